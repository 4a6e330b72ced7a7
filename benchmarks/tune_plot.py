"""The picture of docs/tuning.md: loss by decision, and at the end on every published machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["plot"]

LABELS = {
    "model": "model",
    "climb": "climb",
    "caption": "Caption as published",
    "random search": "random search",
    "first touch": "first touch",
    "static by bandwidth": "by bandwidth, fixed",
    "static 50 %": "50 %, fixed",
}
COLOURS = {name: f"C{at}" for at, name in enumerate(LABELS)}
CLOSE = 3.0
"""Per cent; within it a share counts as the best."""

MOST = 100.0
"""Per cent that are shown; what is worse has an arrow."""


def _by_decision(axis: Any, curves: dict[str, list[list[float]]]) -> None:
    for name, label in LABELS.items():
        rows = curves[name]
        longest = max(len(row) for row in rows)
        table = 100 * np.array([row if len(row) == longest else row * longest for row in rows])
        if longest == 1:
            style = {"ls": "--", "lw": 1.0}
            mean = np.repeat(table.mean(axis=0), 15)
        else:
            style = {"lw": 1.8}
            mean = table.mean(axis=0)
        axis.plot(
            range(1, len(mean) + 1),
            np.maximum(mean, 0.05),
            label=label,
            color=COLOURS[name],
            **style,
        )
    axis.axhline(CLOSE, color="0.8", lw=0.8, zorder=0)
    axis.set(
        xlabel="decisions", ylabel="mean loss against the best share, %", yscale="log",
        title=f"{len(curves['model'])} random workloads",
    )  # fmt: skip
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4)


def _by_machine(axis: Any, names: list[str], curves: dict[str, list[list[float]]]) -> None:
    """One row a workload: machine, far tier and kind of load."""
    rows = np.arange(len(names))
    shown = ("static 50 %", "static by bandwidth", "first touch", "caption", "model")
    marks = {"model": "o", "caption": "^", "first touch": "s", "static by bandwidth": "D"}
    for name in shown:
        loss = np.array([100 * row[-1] for row in curves[name]])
        axis.scatter(
            np.clip(loss, 0.0, MOST),
            rows,
            s=14,
            marker=marks.get(name, "x"),
            color=COLOURS[name],
            label=LABELS[name],
            zorder=3 if name == "model" else 2,
        )
    axis.axvline(CLOSE, color="0.7", lw=0.8, zorder=0)
    for row in rows[::4]:
        axis.axhline(row - 0.5, color="0.85", lw=0.6, zorder=0)
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_xlim(-0.1, 1.15 * MOST)
    axis.set_yticks(rows, names, fontsize=5.5)
    axis.invert_yaxis()
    axis.set(
        xlabel=f"loss against the best share after 15 decisions, % (at {MOST:.0f}: or more)",
        title="published machines and kinds of load",
    )
    axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.3, -0.13), ncols=5)


def plot(
    random: dict[str, list[list[float]]],
    published: dict[str, list[list[float]]],
    names: list[str],
    *,
    noise: float,
    file: Path,
) -> None:
    """Writes the picture.

    Parameters
    ----------
    random, published
        Tuner to its losses, a list for each workload: fractions of the best step, by decision.
    names
        Of the published workloads.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 8), width_ratios=(1, 1.15), layout="constrained"
    )
    _by_decision(left, random)
    _by_machine(right, names, published)
    figure.suptitle(f"Simulated, {noise:.0%} noise of a step, 20 steps a decision", fontsize=10)
    figure.savefig(file, dpi=130)
