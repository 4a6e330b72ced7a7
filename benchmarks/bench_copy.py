"""Copies in host memory against the best of memcpy and stores past the caches.

    python -m benchmarks.bench_copy [--json FILE] [--largest 1GiB] [--room 256MiB] [--plot FILE]

Every figure is measured, inside C++, on buffers of random bytes several times the last-level cache;
the contenders take turns. Columns are medians in GB/s of bytes copied (each is read once and
written once). ``own`` is what HostCopier does with rules measured just before by measure_rules;
``ratio`` is own against the best single way at that size, and should be at least 0.95. Blocks are
scattered blocks of one size, against a memcpy of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurements import check_plot, describe_machine
from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import HostCopier, measure_rules
from cxl_offload.transfer.host import save_rules
from cxl_offload.units import format_bytes, parse_bytes

BAR = 0.95
Row = dict[str, Any]


def ways_of(threads: int) -> dict[str, tuple[bool, int]]:
    ways = {"memcpy x1": (False, 1), "nt x1": (True, 1)}
    if threads > 1:
        ways |= {f"memcpy x{threads}": (False, threads), f"nt x{threads}": (True, threads)}
    return ways


def bench_sizes(copier: HostCopier, buffers: Any, room: int, largest: int) -> list[Row]:
    target, source = buffers
    ways = ways_of(copier.threads)
    rows = []
    size = 4096
    while size <= largest:
        turns = max(7, min(101, (4 << 30) // size))
        # Own twice, first and last: the spread between two runs of the same thing is the noise.
        contenders = [None, *ways.values(), None]
        samples = copier.time(
            target=target.address,
            source=source.address,
            room_bytes=max(room, size),
            nbytes=size,
            ways=contenders,
            rounds=turns,
        )
        check(target, source, size)
        seconds = [statistics.median(each) for each in samples]
        rates = {name: size / each for name, each in zip(ways, seconds[1:-1], strict=True)}
        own = size / statistics.median([*samples[0], *samples[-1]])
        rows.append(
            {
                "nbytes": size,
                "own_bytes_per_s": own,
                "ways_bytes_per_s": rates,
                "ratio": own / max(rates.values()),
                "noise": abs(seconds[0] - seconds[-1]) / min(seconds[0], seconds[-1]),
                "rounds": turns,
            }
        )
        size *= 2
    return rows


def check(target: _C.Allocation, source: _C.Allocation, size: int) -> None:
    got, wanted = (np.from_dlpack(each)[:size] for each in (target, source))
    if not (got == wanted).all():
        raise SystemExit(f"bench_copy: a copy of {size} bytes arrived wrong")


def bench_blocks(copier: HostCopier, buffers: Any, room: int) -> list[Row]:
    """Scattered blocks, one call for all; the peer is one memcpy after the other."""
    target, source = buffers
    plain = _C.HostCopier([], [(0, False, 1)])
    rows = []
    for block in (4096, 16384, 65536, 262144, 1 << 20, 2 << 20):
        count = min(room // block, max(8, (64 << 20) // block))
        order = np.random.default_rng(block)
        to, origin = (
            (each.address + order.permutation(room // block)[:count] * block).astype(np.uint64)
            for each in (target, source)
        )
        sizes = np.full(count, block, np.int64)
        lists = {
            "targets": to.ctypes.data,
            "sources": origin.ctypes.data,
            "sizes": sizes.ctypes.data,
            "count": count,
        }
        samples: dict[str, list[float]] = {"own": [], "memcpy each": []}
        for turn in range(21):
            calls = {"own": copier._core.copy_blocks, "memcpy each": plain.copy_blocks}
            for name in samples if turn % 2 else reversed(samples):
                begin = time.perf_counter()
                calls[name](**lists)
                samples[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(each) for name, each in samples.items()}
        rows.append(
            {
                "block_bytes": block,
                "own_bytes_per_s": count * block / medians["own"],
                "memcpy_each_bytes_per_s": count * block / medians["memcpy each"],
                "ratio": medians["memcpy each"] / medians["own"],
            }
        )
    return rows


def print_report(report: dict[str, Any]) -> None:
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    names = list(report["sizes"][0]["ways_bytes_per_s"])
    print("".join(f"{name:>12}" for name in ["size", *names, "own", "ratio", "noise"]))
    for row in report["sizes"]:
        cells = [f"{rate / 1e9:.2f}" for rate in row["ways_bytes_per_s"].values()]
        cells += [f"{row['own_bytes_per_s'] / 1e9:.2f}", f"{row['ratio']:.3f}"]
        cells += [f"{row['noise']:.1%}"]
        print(f"{format_bytes(row['nbytes']):>12}" + "".join(f"{cell:>12}" for cell in cells))
    below = [format_bytes(row["nbytes"]) for row in report["sizes"] if row["ratio"] < BAR]
    print(f"below {BAR}: {', '.join(below) or 'none'}")
    print("rules: " + ", ".join(str(rule) for rule in report["rules"]))
    for row in report["blocks"]:
        print(
            f"blocks of {format_bytes(row['block_bytes']):>8}: own "
            f"{row['own_bytes_per_s'] / 1e9:6.2f} GB/s, memcpy each "
            f"{row['memcpy_each_bytes_per_s'] / 1e9:6.2f} GB/s, ratio {row['ratio']:.2f}"
        )


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    sizes = [row["nbytes"] for row in report["sizes"]]
    for name in report["sizes"][0]["ways_bytes_per_s"]:
        rates = [row["ways_bytes_per_s"][name] / 1e9 for row in report["sizes"]]
        axes.plot(sizes, rates, label=name, linewidth=1)
    own = [row["own_bytes_per_s"] / 1e9 for row in report["sizes"]]
    axes.plot(sizes, own, label="cxl_offload", linewidth=2, color="black")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of one copy")
    axes.set_ylabel("GB/s copied (measured)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rules", type=Path, help="where to keep the measured rules")
    parser.add_argument("--largest", type=parse_bytes, default=1 << 30)
    parser.add_argument("--room", type=parse_bytes, default=256 << 20)
    options = parser.parse_args()
    check_plot(options.plot)
    session = Session.linux()
    largest = max(options.largest, options.room)
    node = session.kernel.local_node
    buffers = [session.allocate(largest, f"preferred:{node}") for _ in range(2)]
    for each in buffers:
        _C.fill_random(each.address, largest, _C.allowed_cpus(), seed=each.address)
    rules = measure_rules(
        target=buffers[0].address, source=buffers[1].address, room_bytes=options.room
    )
    copier = HostCopier(rules=rules)
    report = {
        "machine": describe_machine() | {"kind": "measured"},
        "rules": [(rule.from_bytes, rule.non_temporal, rule.threads) for rule in rules],
        "sizes": bench_sizes(copier, buffers, options.room, options.largest),
        "blocks": bench_blocks(copier, buffers, options.room),
    }
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    if options.rules:
        save_rules(options.rules, rules)
    if options.plot:
        plot(report, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
