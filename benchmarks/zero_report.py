"""The report of bench_zero_offload.py: the tables and the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measurements import paired_ratio

STOCK = "stock, DeepSpeedCPUAdam"
OURS = "placement, CPUAdam"
PARTS = ("optimizer", "engine.step", "step")
BYTES_PER_PARAM = 28

Sample = dict[str, float]
"""Part of a step to seconds."""


def show(
    table: Mapping[str, Mapping[str, Sequence[float]]], numel: int, *, clock: str, loud: int
) -> None:
    """Prints medians and ratios."""
    how = "measured" if clock == "wall" else "measured, CPU seconds a thread"
    rounds = len(table[STOCK]["step"])
    print(f"\n{numel / 1e6:.1f} M parameters, {rounds} interleaved rounds ({how}); ms")
    print(f"  {'':26s}{'optimizer':>11s}{'engine.step':>13s}{'step':>9s}  speedup over stock")
    for name, parts in table.items():
        times = [f"{np.median(parts[p]) * 1e3:.1f}" if parts[p] else "-" for p in PARTS]
        line = f"  {name:26s}{times[0]:>11s}{times[1]:>13s}{times[2]:>9s}"
        print(line + ("" if name in (STOCK, "bound") else "  " + _ratios(table, name)))
    share = np.median(np.divide(table[STOCK]["optimizer"], table[STOCK]["step"]))
    print(f"  the optimizer is {share:.1%} of a stock step")
    for name in (STOCK, OURS):
        ratio = paired_ratio(table["bound"]["optimizer"], table[name]["optimizer"])
        print(f"  {name}: {ratio.median:.2f} ({ratio.low:.2f} .. {ratio.high:.2f}) of the bound")
    rate = BYTES_PER_PARAM * numel / np.median(table["bound"]["optimizer"]) / 1e9
    print(f"  the bound moved {rate:.2f} GB/s; {loud} samples were kept in spite of other work")


def show_grid(
    cells: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], *, clock: str
) -> None:
    """Prints the ratios of every size."""
    how = "measured" if clock == "wall" else "measured, CPU seconds a thread"
    print(f"\n{'sequences x tokens':20s}{'':20s}  speedup over stock: {', '.join(PARTS)} ({how})")
    for cell, table in cells.items():
        for name in (each for each in table if each != STOCK):
            print(f"{cell:20s}{name:20s}  {_ratios(table, name)}")


def _ratios(table: Mapping[str, Mapping[str, Sequence[float]]], name: str) -> str:
    found = [paired_ratio(table[STOCK][part], table[name][part]) for part in PARTS]
    return ", ".join(f"{r.median:.2f} ({r.low:.2f} .. {r.high:.2f})" for r in found)


def plot(path: Path, medians: Mapping[str, Mapping[str, float]]) -> None:
    """Medians of every part, beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, part in zip(figure.subplots(1, len(PARTS)), PARTS, strict=True):
        rows = {name: found[part] * 1e3 for name, found in medians.items() if part in found}
        axis.barh(list(rows)[::-1], list(rows.values())[::-1])
        axis.set_title(part)
        axis.set_xlabel("ms (measured)")
    figure.savefig(path, dpi=120)
