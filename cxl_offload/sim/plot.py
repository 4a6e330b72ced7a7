"""A picture of a timeline: what each queue did when, and how busy the nodes were.

Needs matplotlib, imported when used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from cxl_offload.arrays import Floats, Integers
from cxl_offload.errors import ConfigError
from cxl_offload.files import save_figure
from cxl_offload.files.picture import DPI
from cxl_offload.sim.columns import Columns
from cxl_offload.sim.timeline import Timeline
from cxl_offload.units import GB, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (11.0, 6.0)
_MOST_BARS = 20_000
_NODE_COLOURS = ("black", "#e6007e", "#008b8b", "#7a5c00", "#4b0082", "#7f0000")
"""Kinds of tensors have matplotlib's own, so no colour is both."""

_SPREAD = (
    "Dotted: the most that is known to reach a node. Bytes are spread evenly over the time of "
    "their copy or computation:\na line passes its limit where one was fast while it was alone, "
    "and slow beside another."
)
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def plot_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    first_step: int | None = None,
    steps: int | None = 16,
) -> None:
    """Draws a window of steps: a bar an event, a row a queue, and bytes/s of every node below.

    Parameters
    ----------
    path
        PNG, SVG or PDF, by its ending.
    first_step
        Number of the first step to draw; that of the trace by default.
    steps
        How many steps to draw; ``None``: all that follow.

    Raises
    ------
    ConfigError
        The trace has no such step, or the window has more events than a picture can show.
    ModuleNotFoundError
        matplotlib is not installed.
    OSError
        The file cannot be written.
    """
    from matplotlib.figure import Figure

    columns = Columns.of(timeline.trace.events)
    window = _window(columns.step_of, first_step, steps)
    begin, end = timeline.starts_s[window].min(), timeline.ends_s[window].max()
    scale, unit = next((pair for pair in _SCALES if end - begin >= pair[0]), _SCALES[-1])
    figure = Figure(figsize=_INCHES, dpi=DPI, layout="constrained")
    bars, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_queues(bars, timeline, columns, window, scale)
    _draw_nodes(rates, timeline, window, scale)
    rates.set_xlabel(f"simulated time, {unit}")
    figure.supxlabel(_SPREAD, fontsize="small", x=0.01, ha="left")
    rates.set_xlim(begin / scale, max(end, begin + 1e-12) / scale)
    shown = columns.step_of[window]
    figure.suptitle(
        f"simulated: {timeline.machine}, steps {shown.min()} to {shown.max()}, "
        f"{len(window)} events, {format_seconds(float(end - begin))} of "
        f"{format_seconds(timeline.seconds)}"
    )
    save_figure(figure, path)


def _window(step_of: Integers, first_step: int | None, steps: int | None) -> Integers:
    known = np.unique(step_of)
    first = int(known[0]) if first_step is None else first_step
    at = np.flatnonzero(known == first)
    if not len(at):
        raise ConfigError(f"the trace has no step {first}; its steps are {known[0]} to {known[-1]}")
    if steps is not None and steps < 1:
        raise ConfigError(f"a window of {steps} steps; draw at least 1")
    wanted = known[int(at[0]) :][:steps]
    window = np.flatnonzero((step_of >= wanted[0]) & (step_of <= wanted[-1]))
    if len(window) > _MOST_BARS:
        raise ConfigError(
            f"a picture of {len(window)} events; draw fewer steps, so that they are at most "
            f"{_MOST_BARS}"
        )
    return window


def _draw_queues(
    axes: Axes, timeline: Timeline, columns: Columns, window: Integers, scale: float
) -> None:
    events = timeline.trace.events
    kinds = sorted({events[at].tensor_kind for at in window.tolist()})
    drawn = np.unique(columns.queue_of[window])
    starts = timeline.starts_s / scale
    lengths = (timeline.ends_s - timeline.starts_s) / scale
    labelled: set[str] = set()
    for row, queue in enumerate(drawn.tolist()):
        for number, kind in enumerate(kinds):
            of_queue = window[columns.queue_of[window] == queue].tolist()
            mine = [at for at in of_queue if events[at].tensor_kind == kind]
            if mine:
                axes.broken_barh(
                    [(starts[at], lengths[at]) for at in mine],
                    (row - 0.4, 0.8),
                    facecolors=f"C{number}",
                    edgecolor="white",
                    linewidth=0.3,
                    label=None if kind in labelled else kind,
                )
                labelled.add(kind)
    axes.set_yticks(range(len(drawn)), [columns.queues[queue] for queue in drawn.tolist()])
    axes.invert_yaxis()
    barriers = [
        starts[window[columns.step_of[window] == step]].min()
        for step in np.unique(columns.step_of[window])
    ]
    for barrier in barriers:
        axes.axvline(barrier, color="0.8", linewidth=0.5, zorder=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", title="bytes of")


def _draw_nodes(axes: Axes, timeline: Timeline, window: Integers, scale: float) -> None:
    edges, rates = node_rates(timeline, window)
    for number, (node, rate) in enumerate(rates.items()):
        colour = _NODE_COLOURS[number % len(_NODE_COLOURS)]
        axes.stairs(rate / GB, edges / scale, color=colour, linewidth=1.4, label=f"node {node}")
        limit = timeline.node_bandwidth_bytes_per_s.get(node)
        if limit is not None:
            axes.axhline(limit / GB, color=colour, linestyle=":", linewidth=1.2)
    axes.set_ylabel("GB/s read and written")
    if rates:
        axes.set_yscale("symlog", linthresh=1.0)
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", title="traffic of"
        )


def node_rates(timeline: Timeline, events: Integers) -> tuple[Floats, dict[int, Floats]]:
    """Bytes/s of every node over time, each event's spread evenly from its begin to its end.

    Events speed up when others end, so for a while these sums can lie above what the node gives;
    over the whole of the events they cannot.

    Parameters
    ----------
    events
        int64 ``(n,)``: numbers of the events that count.

    Returns
    -------
    edges
        float64 ``(m + 1,)`` s: when some event begins or ends, ascending.
    rates
        Node -> float64 ``(m,)`` bytes/s between the edges.
    """
    edges = np.unique(np.concatenate((timeline.starts_s[events], timeline.ends_s[events])))
    changes: dict[int, Floats] = {}
    for number in events.tolist():
        event = timeline.trace.events[number]
        begin, end = timeline.starts_s[number], timeline.ends_s[number]
        if end <= begin:
            continue
        first, last = np.searchsorted(edges, (begin, end))
        for per_node in (event.read_bytes, event.write_bytes):
            for node, count in per_node.items():
                change = changes.setdefault(node, np.zeros(len(edges)))
                change[first] += count / (end - begin)
                change[last] -= count / (end - begin)
    rates = {node: np.cumsum(change)[:-1] for node, change in sorted(changes.items())}
    return edges, {node: np.maximum(rate, 0.0) for node, rate in rates.items()}
