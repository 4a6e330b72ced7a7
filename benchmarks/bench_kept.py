"""Kept blocks: how long a full store takes to open, and what the checksum of every block costs.

A process fills a store in /dev/shm, placed on a node, and is killed. Then it is opened again,
by fresh processes; the time is that of the constructor, with its pages mapped and their places
asked, and of the books that vLLM keeps (where vLLM is installed). Blocks are then copied out with
and without the check, in turns. Everything is measured.

    python -m benchmarks.bench_kept [--bytes 10GiB] [--block 128KiB] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload.kept import KeptLayout, KeptStore, Placing, drop_kept, kept_path
from cxl_offload.kept.layout import is_right
from cxl_offload.memory import Bind, current_session
from cxl_offload.units import format_bytes, parse_bytes

BAR_OPEN_S = 2.0
FACTS = {"model": "benchmark"}


def opened(path: Path, layout: KeptLayout) -> KeptStore:
    session = current_session()
    placing = Placing(session, Bind((session.kernel.local_node,)), "base")
    return KeptStore(path, layout, FACTS, prepare=placing)


def fill(path: Path, layout: KeptLayout) -> None:
    """Every slot holds another block; then the process is killed."""
    store = opened(path, layout)
    block = bytearray(np.random.default_rng(0).bytes(layout.block_bytes))
    for slot in range(layout.slots):
        block[:8] = slot.to_bytes(8, "little")
        store.write_block(slot, memoryview(block))
        store.commit(slot, slot.to_bytes(36, "little"))
    os.kill(os.getpid(), signal.SIGKILL)


def open_once(path: Path, layout: KeptLayout) -> dict[str, Any]:
    current_session()  # the machine is known before: an engine has its session long since
    begin, used = time.perf_counter(), time.process_time()
    store = opened(path, layout)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - used
    books = None
    if find_spec("vllm") is not None:
        from cxl_offload.integrations.vllm.kv_books import ColdBooks

        begin = time.perf_counter()
        ColdBooks(tier="cold", chunk_bytes=layout.block_bytes, num_chunks=layout.slots).restore(
            store.entries
        )
        books = time.perf_counter() - begin
    return {
        "open_s": seconds,
        "open_cpu_s": cpu_seconds,
        "books_s": books,
        "blocks": len(store.entries),
    }


def check_cost(path: Path, layout: KeptLayout, rounds: int) -> dict[str, Any]:
    """Seconds of copying blocks out and checking the copies, over those of copying alone."""
    store = opened(path, layout)
    some = store.entries[: max(1, (256 << 20) // layout.block_bytes)]
    target = bytearray(layout.block_bytes)
    view = memoryview(target)

    def copy(checks: bool) -> float:
        begin = time.perf_counter()
        for entry in some:
            view[:] = store.block(entry.slot)
            if checks and not is_right(view, entry.digest):
                raise SystemExit(f"block in slot {entry.slot} is damaged")
        return time.perf_counter() - begin

    plain: list[float] = []
    checked: list[float] = []
    for turn in range(rounds + 1):
        for checks, times in ((False, plain), (True, checked))[:: 1 if turn % 2 else -1]:
            times.append(copy(checks))
    nbytes = len(some) * layout.block_bytes
    ratio = paired_ratio(checked[1:], plain[1:])  # the first turn faults pages in
    return {
        "copy_bytes_per_s": nbytes / statistics.median(plain[1:]),
        "checked_bytes_per_s": nbytes / statistics.median(checked[1:]),
        "ratio": [ratio.median, ratio.low, ratio.high],
    }


def child(
    what: str, path: Path, layout: KeptLayout, rounds: int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.bench_kept", "--child", what, "--path", str(path)]
    command += ["--bytes", f"{layout.slots * layout.block_bytes}B", "--rounds", str(rounds)]
    command += ["--block", f"{layout.block_bytes}B"]
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)


def answer(what: str, path: Path, layout: KeptLayout, rounds: int) -> dict[str, Any]:
    done = child(what, path, layout, rounds)
    if done.returncode:
        raise SystemExit(f"--child {what} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(layout: KeptLayout, rounds: int) -> dict[str, Any]:
    path = kept_path(f"benchmark-{uuid4().hex}")
    try:
        if child("fill", path, layout, 0).returncode != -signal.SIGKILL:
            raise SystemExit("the store could not be filled")
        opens = [answer("open", path, layout, 0) for _ in range(rounds)]
        if any(each["blocks"] != layout.slots for each in opens):
            raise SystemExit("blocks are missing after the kill")
        cost = answer("check", path, layout, rounds)
    finally:
        if path.exists():
            drop_kept(path)
    return {
        "machine": describe_machine(),
        "bytes": layout.slots * layout.block_bytes,
        "block_bytes": layout.block_bytes,
        "open_s": [each["open_s"] for each in opens],
        "open_cpu_s": [each["open_cpu_s"] for each in opens],
        "books_s": [each["books_s"] for each in opens],
        "check": cost,
    }


def report(found: dict[str, Any]) -> None:
    opens = found["open_s"]
    print(
        f"store of {format_bytes(found['bytes'])}, blocks of {format_bytes(found['block_bytes'])}"
    )
    books = [each for each in found["books_s"] if each is not None]
    told = f", vLLM's books {statistics.median(books):.2f} s" if books else ""
    cpu = statistics.median(found["open_cpu_s"])
    print(
        f"opened in {statistics.median(opens):.2f} s (most {max(opens):.2f} s; {cpu:.2f} s of CPU)"
        f"{told}"
    )
    middle, low, high = found["check"]["ratio"]
    print(
        f"copied and checked at {found['check']['checked_bytes_per_s'] / 1e9:.1f} GB/s, copied at "
        f"{found['check']['copy_bytes_per_s'] / 1e9:.1f} GB/s: {middle:.2f} ({low:.2f}-{high:.2f}) "
        "times as long; measured"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=parse_bytes, default="10GiB")
    parser.add_argument("--block", type=parse_bytes, default="128KiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=("fill", "open", "check"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    layout = KeptLayout.within(args.bytes, args.block)
    match args.child:
        case "fill":
            fill(args.path, layout)
        case "open":
            print(json.dumps(open_once(args.path, layout)))
        case "check":
            print(json.dumps(check_cost(args.path, layout, args.rounds)))
        case _:
            found = measure(layout, args.rounds)
            report(found)
            if args.json is not None:
                write_json(args.json, found)
            raise SystemExit(statistics.median(found["open_s"]) > BAR_OPEN_S)


if __name__ == "__main__":
    main()
