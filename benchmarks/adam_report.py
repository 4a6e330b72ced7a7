"""The report of bench_adam.py: what a case and a result are, the table and the plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Case:
    name: str
    param: torch.dtype  # and gradient
    state: torch.dtype

    @property
    def bytes_per_param(self) -> int:
        """Read: parameter, gradient, two states. Written: all but the gradient."""
        return 3 * self.param.itemsize + 4 * self.state.itemsize


@dataclass
class Result:
    name: str
    median_s: float
    bandwidth_bytes_per_s: float
    of_bound: float
    of_bound_low: float
    of_bound_high: float
    speedup: float | None = None  # of this package over the contender
    speedup_low: float | None = None
    speedup_high: float | None = None
    samples_s: list[float] = field(default_factory=list)


def show(case: Case, results: list[Result]) -> None:
    print(f"\n{case.name}: {case.bytes_per_param} B a parameter (measured)")
    print(f"  {'':30s} {'ms':>8s} {'GB/s':>7s} {'of bound':>9s}  95 % interval  speedup of ours")
    for r in results:
        line = f"  {r.name:30s} {r.median_s * 1e3:8.1f} {r.bandwidth_bytes_per_s / 1e9:7.2f}"
        line += f" {r.of_bound:9.3f}  {r.of_bound_low:.3f} .. {r.of_bound_high:.3f}"
        if r.speedup is not None:
            line += f"  {r.speedup:.2f} ({r.speedup_low:.2f} .. {r.speedup_high:.2f})"
        print(line)


def plot(path: Path, all_results: dict[str, list[Result]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(all_results), figsize=(5 * len(all_results), 3.6))
    for axis, (name, results) in zip(np.atleast_1d(axes), all_results.items(), strict=True):
        labels = [r.name for r in results][::-1]
        values = np.array([r.of_bound for r in results])[::-1]
        low = values - np.array([r.of_bound_low for r in results])[::-1]
        high = np.array([r.of_bound_high for r in results])[::-1] - values
        axis.barh(labels, values, xerr=np.clip([low, high], 0, None), capsize=3)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(f"{name} (measured)")
        axis.set_xlabel("speed, of the bound")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
