"""Events a second of the replay: a decoding loop that repeats, and traces that never do.

The bar is a million events in 10 s. Times are those of this machine (measured); what is replayed
is simulated.

    python -m benchmarks.bench_sim [--events N] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurements import describe_machine, write_json
from cxl_offload.sim import Event, Trace, replay
from cxl_offload.topology import load_machine

MIB = 1 << 20


def one(step: int, queue: str, engine: Any, read: int, write: int, flops: float = 0.0) -> Event:
    """An event that moves bytes of local DRAM and of CXL."""
    return Event(
        phase="decode",
        step=step,
        queue=queue,
        engine=engine,
        tensor_kind="kv",
        read_bytes={0: read, 2: read // 3} if read else {},
        write_bytes={0: write} if write else {},
        accelerator_bytes=(read or write) if engine != "cpu" else 0,
        flops=flops,
    )


def decoding(count: int, varied: bool) -> Trace:
    """Steps of five queues; with ``varied`` no two steps move the same bytes."""
    draw = random.Random(0)
    events = []
    for step in range(count // 5):
        size = draw.randrange(MIB, 64 * MIB) if varied else 16 * MIB
        events += [
            one(step, "load_weight", "h2d", size, 0),
            one(step, "load_cache", "h2d", size // 2, 0),
            one(step, "store_cache", "d2h", 0, size // 7),
            one(step, "hidden", "d2h", 0, size // 9),
            one(step, "compute", "cpu", size * 2, size // 5),
        ]
    return Trace(events)


def mixed(step: int, queue: str, engine: Any, reads: str, writes: str, draw: Any) -> Event:
    """An event whose bytes on every node are drawn."""
    read = {int(node): draw.randrange(MIB, 64 * MIB) for node in reads}
    write = {int(node): draw.randrange(MIB, 64 * MIB) for node in writes}
    moved = 0 if engine == "cpu" else sum(read.values()) + sum(write.values())
    return Event("decode", step, queue, engine, "kv", read, write, moved)


def proportions(count: int) -> Trace:
    """As above, and no two events spread their bytes over the nodes alike."""
    draw = random.Random(1)
    return Trace(
        mixed(step, queue, engine, reads, writes, draw)
        for step in range(count // 5)
        for queue, engine, reads, writes in (
            ("load_weight", "h2d", "02", ""),
            ("load_cache", "h2d", "01", ""),
            ("store_cache", "d2h", "", "0"),
            ("hidden", "d2h", "", "02"),
            ("compute", "cpu", "012", "0"),
        )
    )


def layouts(count: int) -> Trace:
    """Five events a step, each with an engine, a queue and nodes that are drawn."""
    draw = random.Random(2)
    events = []
    for number in range(count):
        engine = draw.choice(["h2d", "d2h", "cpu"])
        nodes = "".join(draw.sample("012", draw.randrange(1, 4)))
        reads, writes = (nodes, "") if engine != "d2h" else ("", nodes)
        events.append(mixed(number // 5, draw.choice("abcde"), engine, reads, writes, draw))
    return Trace(events)


def one_step(count: int) -> Trace:
    """Five queues without a barrier in between."""
    return Trace(replace(event, step=0) for event in decoding(count, varied=True))


TRACES: tuple[tuple[str, Callable[[int], Trace]], ...] = (
    ("steps that repeat", lambda count: decoding(count, varied=False)),
    ("no two steps alike", lambda count: decoding(count, varied=True)),
    ("no two events spread alike", proportions),
    ("one step without a barrier", one_step),
    ("every step laid out at random", layouts),
)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = load_machine("epyc9354-cxl-a")
    results = []
    for name, make in TRACES:
        trace = make(options.events)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        timeline = replay(trace, machine)
        took_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
        results.append(
            {
                "trace": name,
                "kind": "measured",
                "events": len(trace),
                "seconds": took_s,
                "cpu_seconds": cpu_s,
                "events_per_s": len(trace) / took_s,
                "simulated_seconds": timeline.seconds,
            }
        )
        del trace, timeline
    made = Table("trace", title="Replay (measured; five queues a step, all contending)")
    for heading in ("events", "seconds", "CPU seconds", "events/s"):
        made.add_column(heading, justify="right")
    for row in results:
        made.add_row(
            str(row["trace"]),
            f"{row['events']:,}",
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['events_per_s']:,.0f}",
        )
    Console().print(made)
    if options.json is not None:
        write_json(options.json, {**describe_machine(), "results": results})


if __name__ == "__main__":
    main()
