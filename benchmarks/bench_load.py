"""First touch and load: memory that is made, and a checkpoint's way to its place.

    python -m benchmarks.bench_load [--gib 2] [--rounds 7] [--folder DIR] [--json FILE]

A LLaMA with random weights in float32 is written as shards of safetensors. Where the machine has no
room for `--gib`, in memory and in `--folder`, as much is done as it has, and the benchmark says so.
Everything is measured, and what stands beside each other takes turns:

- *fault-in*: `cxl_offload.empty()` of as many bytes, whose pages are there and were asked for their
  node, against memory that threads on all CPUs write for the first time (`memset`), with pages of
  the same kind;
- *load, cached*: `load()` with every weight bound to node 0, the files in the page cache. The bound
  is the memset of as many bytes and then a read of the files into it by all CPUs. Beside it stands
  stock `from_pretrained`, which maps the files, and then a look at every page, since a page that
  was not looked at is not loaded. Its weights stay pages of the files, which no policy places and
  the kernel may drop; with `disable_mmap` stock copies them to memory too, which is a row as well;
- *load, drive*: the same after the files are dropped from the page cache. The bound is the drive:
  reads past the page cache by as many threads.

A load's parts are printed and in the JSON with bytes, seconds and GB/s: the time in which memory is
made and faulted in, beside the memset of the same round; that in which files are read into it,
beside the reads of all CPUs; the time that counts in both, since they run at once; and the rest,
most of which is transformers' own.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
from cxl_offload.integrations.transformers import load
from cxl_offload.memory import Pages
from cxl_offload.objects.load_parts import FAULT_IN, READING, LoadClock, LoadPart

_READ_BYTES = 8 << 20
_PAGES: dict[Pages, int] = {"base": mmap.MADV_NOHUGEPAGE, "thp": mmap.MADV_HUGEPAGE}

SHARE_OF_MEMORY, SHARE_OF_DISK = 0.45, 0.9
"""What weights may take: they are in memory twice, once as pages of their files."""

Seconds = dict[str, list[float]]
Parts = tuple[LoadPart, ...]


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


def stock(folder: Path, **options: Any) -> float:
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, **options
    )
    looked_at(model)
    return time.perf_counter() - begin


def ours(folder: Path, parts: list[Parts]) -> float:
    session = Session.linux()
    with LoadClock() as clock:
        model = load(folder, {"weights": "bind:0"}, session=session)
    del model
    gc.collect()
    session.trim()
    parts.append(clock.parts)
    return clock.seconds


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
    found: Seconds = {name: [] for name in ("ours", "stock", "copied", "bound", FAULT_IN, READING)}
    parts: list[Parts] = []

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
        taken["copied"] = stock(folder, disable_mmap=True)
        gc.collect()
        fresh()
        memory, made_s = written_first(nbytes, "base")
        read_s = read_all(folder, memory, direct=drive)
        memory.close()
        taken["bound"] = max(made_s, read_s) if drive else made_s + read_s
        taken |= {FAULT_IN: made_s, READING: read_s}
        if at:
            for name, seconds in taken.items():
                found[name].append(seconds)
    case = "load, files on the drive" if drive else "load, files in the page cache"
    rows = [
        row_of(case, beside, nbytes, {"ours": found["ours"], name: found[name]})
        for name, beside in (
            ("bound", "the drive's bound" if drive else "memory's bound"),
            ("stock", "stock transformers, every page looked at"),
            ("copied", "stock transformers, disable_mmap"),
        )
    ]
    rows[0]["parts"] = [[part.to_json() for part in each] for each in parts[1:]]
    return rows + rows_of_parts(case, nbytes, parts[1:], found)


def rows_of_parts(
    case: str, nbytes: int, parts: Sequence[Parts], found: Seconds
) -> list[dict[str, Any]]:
    """The parts that move bytes, each beside what did as much for all of the weights."""
    rows = []
    for part, beside in ((FAULT_IN, "memset's bound"), (READING, "file reads' bound")):
        ours_of = [next(one for one in each if one.name == part) for each in parts]
        moved = ours_of[0].nbytes
        # The files have a few bytes more than what is made or read, and the other way around.
        theirs_s = [seconds * moved / nbytes for seconds in found[part]]
        samples = {"ours": [one.seconds for one in ours_of], part: theirs_s}
        rows.append(row_of(f"{case}: {part}", beside, moved, samples))
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
    """Medians of the parts of every load, their shares of it, and what they moved how fast."""
    cells = []
    for row in rows:
        for at, part in enumerate(row["parts"][0] if "parts" in row else ()):
            runs = [each[at]["seconds"] for each in row["parts"]]
            share = statistics.median(np.divide(runs, row["seconds"]["ours"]))
            middle, moved = statistics.median(runs), part["bytes"]
            told = [row["case"], part["name"], f"{middle:.3f} s", f"{share:.0%}"]
            rate = [f"{moved / 1e9:.2f} GB", f"{moved / middle / 1e9:.2f}"] if moved else ["-", "-"]
            cells.append(told + rate)
    return markdown_table(["case", "part", "time", "of the load", "bytes", "GB/s"], cells)


def memory_there() -> int:
    """Bytes of this machine that are free or can be made so, as the kernel says."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable: this kernel is older than 3.14")


def fitting(asked: int, folder: Path) -> int:
    """As many bytes of weights as were asked for, or those that there is room for."""
    room = {
        "memory": int(SHARE_OF_MEMORY * memory_there()),
        f"{folder}": int(SHARE_OF_DISK * shutil.disk_usage(folder).free),
    }
    short = min(room, key=lambda name: room[name])
    if asked <= room[short]:
        return asked
    most, wanted = room[short] / 2**30, asked / 2**30
    print(f"{wanted:.1f} GiB of weights do not fit ({short}): {most:.1f} GiB are loaded instead")
    return room[short]


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
        asked = int(args.gib * 2**30)
        nbytes = make_checkpoint(folder, LARGE, fitting(asked, folder))
        rows = bench_fault_in(nbytes, args.rounds)
        for drive in (False, True):
            rows += bench_load(folder, nbytes, args.rounds, drive=drive)
    print(printed(rows))
    print(printed_parts(rows))
    if args.json:
        document: dict[str, Any] = {"machine": describe_machine(), "kind": "measured"}
        document |= {"asked_bytes": asked, "weights_bytes": nbytes, "rows": rows}
        write_json(args.json, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
