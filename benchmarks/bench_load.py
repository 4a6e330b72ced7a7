"""First touch and load: memory that is made, and a checkpoint's way to its place.

    python -m benchmarks.bench_load [--gib 2] [--rounds 7] [--folder DIR] [--json FILE]

A LLaMA with random weights in float32 is written as shards of safetensors. Everything is measured,
and what stands beside each other takes turns:

- *fault-in*: `cxl_offload.empty()` of as many bytes, whose pages are there and were asked for their
  node, against memory that threads on all CPUs write for the first time (`memset`), with pages of
  the same kind;
- *load, cached*: `load()` with every weight bound to node 0, the files in the page cache. The bound
  is the memset of as many bytes and then a read of the files into it by all CPUs. Beside it stands
  stock `from_pretrained`, which maps the files, and then a look at every page, since a page that
  was not looked at is not loaded;
- *load, drive*: the same after the files are dropped from the page cache. The bound is the drive:
  reads past the page cache by as many threads.

The parts of this package's loads are printed and in the JSON: seconds of calls that make memory and
fault it in, of calls that fill it from the files, and the rest, most of which is transformers' own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

import cxl_offload
from benchmarks.large_checkpoint import LARGE, make_checkpoint
from benchmarks.markdown_tables import markdown_table
from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload import Session
from cxl_offload.integrations.transformers import load, weights
from cxl_offload.memory import Pages

_READ_BYTES = 8 << 20
_PAGES: dict[Pages, int] = {"base": mmap.MADV_NOHUGEPAGE, "thp": mmap.MADV_HUGEPAGE}

Seconds = dict[str, list[float]]

FAULT_IN, READING, REST = PARTS = ("fault-in", "reading", "rest")


def on_all_cpus(work: Callable[[int], None], count: int) -> float:
    """Seconds in which threads on all CPUs do every part of some work."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(work, range(count)):
            pass
    return time.perf_counter() - begin


def written_first(nbytes: int, pages: Pages) -> tuple[mmap.mmap, float]:
    """Memory that all CPUs wrote for the first time, and the seconds that it took."""
    begin = time.perf_counter()
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(_PAGES[pages])
    array = np.frombuffer(memory, np.uint8)
    cpus = len(os.sched_getaffinity(0))
    share = -(-nbytes // cpus)
    on_all_cpus(lambda at: array[at * share : (at + 1) * share].fill(0), cpus)
    return memory, time.perf_counter() - begin


def fault_in(nbytes: int, pages: Pages) -> float:
    """Seconds of memory of a session of its own, which has none to use again."""
    session = Session.linux()
    begin = time.perf_counter()
    made = cxl_offload.empty(
        nbytes, dtype=torch.uint8, policy="bind:0", pages=pages, session=session
    )
    took = time.perf_counter() - begin
    del made
    session.trim()
    return took


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(folder: Path) -> None:
    """Takes the checkpoint out of the page cache."""
    for shard in shards_of(folder):
        with shard.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path, target: mmap.mmap, *, direct: bool) -> float:
    """Seconds in which all CPUs read the checkpoint into memory that is there."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    pieces = []
    at = 0
    for shard in shards_of(folder):
        for offset in range(0, shard.stat().st_size, _READ_BYTES):
            pieces.append((shard, offset, at))
            at = (at + _READ_BYTES) % (len(target) - _READ_BYTES)
            at -= at % mmap.PAGESIZE
    opened = {shard: os.open(shard, flags) for shard in shards_of(folder)}
    view = memoryview(target)

    def read(number: int) -> None:
        shard, offset, begin = pieces[number]
        os.preadv(opened[shard], [view[begin : begin + _READ_BYTES]], offset)

    try:
        return on_all_cpus(read, len(pieces))
    finally:
        view.release()
        for each in opened.values():
            os.close(each)


def looked_at(model: PreTrainedModel) -> int:
    """A byte of every page of all weights; a sum, so that it cannot be left out."""
    return sum(
        int(weight.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum())
        for weight in model.parameters()
    )


def stock(folder: Path) -> float:
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    looked_at(model)
    return time.perf_counter() - begin


@contextlib.contextmanager
def calls_timed() -> Iterator[dict[str, float]]:
    """Seconds of the calls in a block that make memory, and of those that fill it with weights."""
    spent = {FAULT_IN: 0.0, READING: 0.0}

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent[part] += time.perf_counter() - begin

        return run

    loading: Any = weights  # which imports what it calls
    allocate, filled = Session.allocate, loading.filled
    Session.allocate = timed(FAULT_IN, allocate)  # type: ignore[method-assign]
    loading.filled = timed(READING, filled)
    try:
        yield spent
    finally:
        Session.allocate, loading.filled = allocate, filled  # type: ignore[method-assign]


def ours(folder: Path, parts: list[dict[str, float]]) -> float:
    session = Session.linux()
    with calls_timed() as spent:
        begin = time.perf_counter()
        model = load(folder, {"weights": "bind:0"}, session=session)
        took = time.perf_counter() - begin
    del model
    gc.collect()
    session.trim()
    parts.append(spent | {REST: took - sum(spent.values()), "seconds": took})
    return took


def bench_fault_in(nbytes: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for pages in _PAGES:
        samples: Seconds = {"ours": [], "memset": []}
        for _ in range(rounds):
            samples["ours"].append(fault_in(nbytes, pages))
            samples["memset"].append(written_first(nbytes, pages)[1])
        rows.append(row_of(f"fault-in, {pages} pages", "memset by all CPUs", nbytes, samples))
    return rows


def row_of(case: str, beside: str, nbytes: int, samples: Seconds) -> dict[str, Any]:
    ours_s, theirs_s = samples.values()
    ratio = paired_ratio(theirs_s, ours_s)
    return {
        "case": case,
        "beside": beside,
        "bytes": nbytes,
        "bytes_per_s": nbytes / statistics.median(ours_s),
        "beside_bytes_per_s": nbytes / statistics.median(theirs_s),
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "seconds": samples,
    }


def bench_load(folder: Path, nbytes: int, rounds: int, *, drive: bool) -> list[dict[str, Any]]:
    """Ours, stock and the bound by turns; each round drops the files first, if asked."""
    found: Seconds = {"ours": [], "stock": [], "bound": []}
    parts: list[dict[str, float]] = []

    def fresh() -> None:
        if drive:
            drop(folder)

    for at in range(rounds + 1):  # the first one warms up
        fresh()
        taken = {"ours": ours(folder, parts)}
        fresh()
        taken["stock"] = stock(folder)
        gc.collect()
        fresh()
        memory, made_s = written_first(nbytes, "base")
        read_s = read_all(folder, memory, direct=drive)
        taken["bound"] = max(made_s, read_s) if drive else made_s + read_s
        if at:
            for name, seconds in taken.items():
                found[name].append(seconds)
    case = "load, files on the drive" if drive else "load, files in the page cache"
    rows = [
        row_of(case, beside, nbytes, {"ours": found["ours"], name: found[name]})
        for name, beside in (
            ("bound", "the drive's bound" if drive else "memory's bound"),
            ("stock", "stock transformers, every page looked at"),
        )
    ]
    rows[0]["parts"] = parts[1:]
    return rows


def printed(rows: Sequence[dict[str, Any]]) -> str:
    head = ["case", "GB/s", "beside", "GB/s", "this package over it", "95 % interval"]
    cells = [
        [
            row["case"],
            f"{row['bytes_per_s'] / 1e9:.2f}",
            row["beside"],
            f"{row['beside_bytes_per_s'] / 1e9:.2f}",
            f"{row['ratio']['median']:.2f}",
            f"{row['ratio']['low']:.2f} to {row['ratio']['high']:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(head, cells)


def printed_parts(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of the parts of every load, and their shares of it."""
    cells = []
    for row in rows:
        if "parts" in row:
            taken = {name: [each[name] for each in row["parts"]] for name in (*PARTS, "seconds")}
            middles = {name: statistics.median(each) for name, each in taken.items()}
            told = [f"{middles[name]:.3f} s ({_share(taken, name):.0%})" for name in PARTS]
            cells.append([row["case"], f"{middles['seconds']:.3f} s", *told])
    return markdown_table(["case", "this package", *PARTS], cells)


def _share(taken: Seconds, name: str) -> float:
    """The median over the rounds of a part's share of its load."""
    pairs = zip(taken[name], taken["seconds"], strict=True)
    return statistics.median(part / whole for part, whole in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0, help="of weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written for the run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        nbytes = make_checkpoint(folder, LARGE, int(args.gib * 2**30))
        rows = bench_fault_in(nbytes, args.rounds)
        for drive in (False, True):
            rows += bench_load(folder, nbytes, args.rounds, drive=drive)
    print(printed(rows))
    print(printed_parts(rows))
    if args.json:
        document = {"machine": describe_machine(), "kind": "measured", "rows": rows}
        write_json(args.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
