"""One picture for each thing that was measured. Needs matplotlib, imported when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cxl_offload.files import save_figure
from cxl_offload.files.picture import DPI
from cxl_offload.profile.model import (
    BandwidthCurve,
    Estimate,
    InterleaveSweep,
    PathProfile,
    Profile,
)
from cxl_offload.units import GB, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_INCHES = (8.0, 5.5)
_NAMES = {"load": "load", "store": "store", "nt_store": "non-temporal store", "copy": "copy"}


class _Picture(NamedTuple):
    title: str
    is_drawn: Callable[[Profile], bool]
    panels: tuple[Callable[[Axes, Profile], None], ...]


def save_plots(profile: Profile, folder: str | Path) -> tuple[Path, ...]:
    """Writes a PNG for everything that the profile has numbers for; makes the folder.

    Returns
    -------
    tuple of Path
        Those written: ``bandwidth.png``, ``loaded_latency.png``, ``mixes.png``, ``pages.png``,
        ``interleave.png`` and ``copies.png``.

    Raises
    ------
    ModuleNotFoundError
        matplotlib is not installed.
    OSError
        A file cannot be written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    drawn = {name: picture for name, picture in _PICTURES.items() if picture.is_drawn(profile)}
    return tuple(_save(profile, picture, target / f"{name}.png") for name, picture in drawn.items())


def _save(profile: Profile, picture: _Picture, file: Path) -> Path:
    # Not pyplot: it keeps figures, and asks the environment for a display.
    from matplotlib.figure import Figure

    width, height = _PANEL_INCHES
    panels = len(picture.panels)
    figure = Figure(figsize=(width * (1 + 0.4 * (panels - 1)), height), dpi=DPI)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel, draw in zip(axes, picture.panels, strict=True):
        draw(panel, profile)
    how = "measured" if profile.measured else "simulated"
    machine = profile.machine
    figure.suptitle(
        f"{picture.title}, {how}\n{machine.cpu_model}, {machine.cpus} CPUs, {profile.date}",
        fontsize="medium",
    )
    save_figure(figure, file)
    return file


def _name(path: PathProfile, profile: Profile) -> str:
    """Which path, unless there is but one."""
    if len(profile.paths) == 1:
        return ""
    return f", CPUs of node {path.initiator} on node {path.node}"


def _spread(estimates: Sequence[Estimate], scale: float) -> list[list[float]]:
    """Lengths of the bars below and above the medians, in units of ``scale``."""
    return [
        [(entry.median - entry.low) / scale for entry in estimates],
        [(entry.high - entry.median) / scale for entry in estimates],
    ]


def _draw_bandwidth(axes: Axes, profile: Profile) -> None:
    most = 1
    curves = [
        (curve, path) for path in profile.paths for curve in path.curves if curve.pages == "base"
    ]
    for number, (curve, path) in enumerate(curves):
        shift = (number - (len(curves) - 1) / 2) * 0.02  # or error bars hide one another
        _draw_curve(axes, curve, _name(path, profile), shift)
        most = max(most, curve.points[-1].threads)
    axes.set_xlabel("threads, each on a CPU of its own (ring: the first within 5 % of the peak)")
    axes.set_xlim(0.5, most + 0.5)
    axes.set_xticks(range(1, most + 1) if most <= 16 else [1, *range(8, most + 1, 8)])
    _finish(axes, "GB/s of the program's own loads and stores")


def _draw_curve(axes: Axes, curve: BandwidthCurve, where: str, shift: float) -> None:
    rates = [point.bandwidth_bytes_per_s for point in curve.points]
    drawn = axes.errorbar(
        [point.threads + shift for point in curve.points],
        [rate.median / GB for rate in rates],
        yerr=_spread(rates, GB),
        marker="o",
        capsize=3,
        label=f"{_NAMES[curve.kind]}{where}",
    )
    if len(curve.points) > 1:
        point = next(p for p in curve.points if p.threads == curve.saturation_threads)
        height = point.bandwidth_bytes_per_s.median / GB
        color = drawn[0].get_color()
        axes.plot(point.threads + shift, height, "o", ms=12, mfc="none", color=color)


def _draw_loaded(axes: Axes, profile: Profile) -> None:
    for path in profile.paths:
        for curve in path.loaded:
            points = sorted(curve.points, key=lambda point: point.bandwidth_bytes_per_s)
            latencies = [point.latency_ns for point in points]
            axes.errorbar(
                [point.bandwidth_bytes_per_s / GB for point in points],
                [latency.median for latency in latencies],
                yerr=_spread(latencies, 1.0),
                marker="o",
                capsize=3,
                label=f"beside {counted(curve.threads, 'thread')} that load{_name(path, profile)}",
            )
    axes.set_xlabel("GB/s of all threads together")
    axes.set_xlim(left=0)
    _finish(axes, "ns a dependent load (bars: 10th to 90th percentile)")


BarGroups = Sequence[tuple[str, Mapping[str, Estimate]]]


def _draw_bars(axes: Axes, groups: BarGroups, scale: float, form: str) -> None:
    """Draws, for every name, the bars of the groups that have it side by side."""
    names = list(dict.fromkeys(name for _, values in groups for name in values))
    width = 0.8 / len(groups)
    for number, (label, values) in enumerate(groups):
        shift = (number - (len(groups) - 1) / 2) * width
        bars = axes.bar(
            [names.index(name) + shift for name in values],
            [value.median / scale for value in values.values()],
            width * 0.95,
            yerr=_spread(list(values.values()), scale),
            capsize=3,
            label=label,
        )
        axes.bar_label(bars, fmt=form, label_type="center", fontsize="small", color="white")
    axes.set_xticks(range(len(names)), names)


def _draw_mixes(axes: Axes, profile: Profile) -> None:
    groups = [
        (
            f"{counted(path.mixes[0].threads, 'thread')}{_name(path, profile)}",
            {f"{mix.reads}:{mix.writes}": mix.bandwidth_bytes_per_s for mix in path.mixes},
        )
        for path in profile.paths
        if path.mixes
    ]
    _draw_bars(axes, groups, GB, "%.3g")
    axes.set_xlabel("lines read : lines written past the caches")
    _finish(axes, "GB/s, reads and writes together")


def _draw_page_latency(axes: Axes, profile: Profile) -> None:
    groups = [
        (
            f"idle latency{_name(path, profile)}",
            {f"{entry.pages} pages": entry.latency_ns for entry in path.latencies},
        )
        for path in profile.paths
    ]
    _draw_bars(axes, groups, 1.0, "%.4g")
    _finish(axes, "ns a dependent load in random order")


def _draw_page_bandwidth(axes: Axes, profile: Profile) -> None:
    """At the thread count that every kind of pages was measured with: the most."""
    groups: dict[str, dict[str, Estimate]] = {}
    for path in profile.paths:
        for curve in (curve for curve in path.curves if curve.kind in ("load", "copy")):
            last = curve.points[-1]
            label = f"{_NAMES[curve.kind]}, {counted(last.threads, 'thread')}{_name(path, profile)}"
            groups.setdefault(label, {})[f"{curve.pages} pages"] = last.bandwidth_bytes_per_s
    compared = [(label, values) for label, values in groups.items() if len(values) > 1]
    if compared:
        _draw_bars(axes, compared, GB, "%.3g")
    _finish(axes, "GB/s of the program's own loads and stores")


def _draw_sweeps(axes: Axes, profile: Profile) -> None:
    groups = [
        (
            f"CPUs of node {sweep.initiator} on nodes {', '.join(map(str, sweep.nodes))}, "
            f"{counted(sweep.threads, 'thread')}",
            {_weights(sweep, point.weights): point.bandwidth_bytes_per_s for point in sweep.points},
        )
        for sweep in profile.sweeps
    ]
    _draw_bars(axes, groups, GB, "%.3g")
    axes.tick_params(axis="x", labelrotation=60)
    axes.set_xlabel("weights of the nodes")
    _finish(axes, "GB/s of loads")


def _draw_copy_bandwidth(axes: Axes, profile: Profile) -> None:
    names = [(f"{copy.gpu}, node {copy.node}", copy) for copy in profile.copies]
    to_gpu = {name: copy.h2d_bandwidth_bytes_per_s for name, copy in names}
    to_host = {name: copy.d2h_bandwidth_bytes_per_s for name, copy in names}
    _draw_bars(axes, [("to the GPU", to_gpu), ("to the host", to_host)], GB, "%.3g")
    _finish(axes, "GB/s of one pinned copy")


def _draw_copy_latency(axes: Axes, profile: Profile) -> None:
    names = [(f"{copy.gpu}, node {copy.node}", copy) for copy in profile.copies]
    to_gpu = {name: copy.h2d_latency_ns for name, copy in names}
    to_host = {name: copy.d2h_latency_ns for name, copy in names}
    _draw_bars(axes, [("to the GPU", to_gpu), ("to the host", to_host)], 1e3, "%.3g")
    _finish(axes, "µs a copy of 64 bytes")


def _weights(sweep: InterleaveSweep, weights: Mapping[int, int]) -> str:
    return ":".join(str(weights.get(node, 0)) for node in sweep.nodes)


def _finish(axes: Axes, unit: str) -> None:
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        # Below the axes: with several paths it would cover what it explains.
        columns = 1 if len(axes.figure.axes) > 1 else 2
        below = (0.5, -0.15)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=below, ncols=columns)


_PICTURES = {
    "bandwidth": _Picture(
        "Bandwidth against threads",
        lambda profile: any(path.curves for path in profile.paths),
        (_draw_bandwidth,),
    ),
    "loaded_latency": _Picture(
        "Latency under load",
        lambda profile: any(path.loaded for path in profile.paths),
        (_draw_loaded,),
    ),
    "mixes": _Picture(
        "Reads and writes mixed",
        lambda profile: any(path.mixes for path in profile.paths),
        (_draw_mixes,),
    ),
    "pages": _Picture(
        "Base and huge pages",
        lambda profile: any(len(path.latencies) > 1 for path in profile.paths),
        (_draw_page_latency, _draw_page_bandwidth),
    ),
    "interleave": _Picture(
        "Weighted interleave", lambda profile: bool(profile.sweeps), (_draw_sweeps,)
    ),
    "copies": _Picture(
        "Copies between GPUs and nodes",
        lambda profile: bool(profile.copies),
        (_draw_copy_bandwidth, _draw_copy_latency),
    ),
}
