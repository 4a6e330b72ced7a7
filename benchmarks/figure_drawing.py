"""How the figures of the papers look: one style, on white, without a display."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.figure_parts import CLOSE, Curve, Panel, Paper, Point
from cxl_offload.files.text import write_bytes

COLOURS = {"near": "#1f6fb4", "remote": "#2a9d5c", "far": "#d9700f", "both": "#6b4ba3"}
PARTS = {"optimizer": "#d9700f", "forward and backward": "#1f6fb4", "exposed copies": "#2a9d5c"}
LINES: dict[str, dict[str, Any]] = {
    "predicted": {"lw": 2.0, "ls": "-"},
    "simulated": {"lw": 2.6, "ls": (0, (1, 1.6)), "alpha": 0.75},
}
DOTS = {"predicted": "o", "simulated": "s"}
PUBLISHED: dict[str, Any] = {"color": "black", "marker": "D", "ms": 6, "ls": "none", "zorder": 5}
LIMITS = {"": "D", "at most": "<", "at least": ">"}
GIVEN: dict[str, Any] = {
    "color": "0.35", "marker": "o", "ms": 7, "mfc": "none", "ls": "none", "zorder": 4,
}  # fmt: skip
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "grid.color": "0.9",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "text.color": "black",
}
WIDTH, HEIGHT = 9.8, 3.9
ROW, BAR, KEY = 0.27, 0.5, 1.25
"""Inches: of a figure and of a panel beside another, of a row, of a bar and of all around them."""

BELOW = 34
"""Points between axes and the key below them."""

MOST = 2.5
"""Ratio up to which the overview has a scale."""

SHADES = 96
"""Colours of a picture, so that it stays small."""

DIGITS = 3
"""Of a number, in the fingerprint of a picture."""


def drawn(paper: Paper) -> list[dict[str, Any]]:
    """All numbers of a paper's figure."""
    return [asdict(panel) for panel in paper.panels()]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def fingerprint(numbers: Any) -> str:
    """What a picture carries, so that a test can tell whether it shows these numbers."""
    return hashlib.sha256(json.dumps(_rounded(numbers)).encode()).hexdigest()


def _error_bar(axes: Any, x: float, y: float, one: Point, *, across: bool) -> None:
    """The published number, with a line where it is a range."""
    if one.high > one.low:
        line = {"color": "black", "lw": 2.2, "zorder": 4}
        ends = [one.low, one.high]
        axes.plot(*((ends, [y, y]) if across else ([x, x], ends)), **line)
        return
    axes.plot([x], [y], **{**PUBLISHED, "marker": LIMITS[one.bound]})


def _curves(axes: Any, panel: Panel) -> None:
    for curve in panel.curves:
        label = f"{curve.label}, {curve.kind}"
        axes.plot(
            curve.x, curve.y, color=COLOURS[curve.tier], label=label, zorder=_order(curve),
            **LINES[curve.kind],
        )  # fmt: skip
    for given in panel.given:
        axes.plot([given.x], [given.y], **GIVEN)
    for one in panel.points:
        axes.plot([one.x, one.x], [one.nearest, one.predicted], color="black", lw=0.9, zorder=3)
        if one.high > one.low:  # no curve passes here
            axes.plot([one.x], [one.predicted], "o", color=COLOURS[one.tier], ms=6, zorder=5)
        _error_bar(axes, one.x, one.low, one, across=False)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(visible=True)


def _order(curve: Curve) -> float:
    return 2.0 if curve.kind == "predicted" else 2.5


def _rows(axes: Any, panel: Panel) -> None:
    for row, one in enumerate(panel.points):
        axes.plot([one.nearest, one.predicted], [row, row], color="0.6", lw=1.2, zorder=2)
        axes.plot([one.predicted], [row], DOTS[one.kind], color=COLOURS["far"], ms=7, zorder=3)
        _error_bar(axes, one.low, row, one, across=True)
    axes.set_yticks(range(len(panel.points)), [one.what for one in panel.points])
    axes.set_ylim(len(panel.points) - 0.5, -0.5)
    axes.set_xlim(left=0 if all(one.low > 0 for one in panel.points) else None)
    axes.set_xlabel(panel.x_label)
    axes.grid(axis="x")


def _bars(axes: Any, panel: Panel) -> None:
    for row, bar in enumerate(panel.bars):
        begin = 0.0
        for name, part in bar.parts:
            alpha = 0.6 if bar.kind == "simulated" else 1.0
            axes.barh(row, part, 0.62, left=begin, color=PARTS[name], alpha=alpha)
            begin += part
    for one in panel.points:
        _error_bar(axes, one.x, 0, one, across=True)
    axes.set_yticks(range(len(panel.bars)), [f"{bar.label}, {bar.kind}" for bar in panel.bars])
    axes.invert_yaxis()
    axes.set_xlabel(panel.x_label)


def _key(panel: Panel) -> list[tuple[dict[str, Any], str]]:
    """Marks of a panel that stand for something, with their names, besides those of its curves."""
    found: list[tuple[dict[str, Any], str]] = []
    if panel.rows:
        for kind in sorted({one.kind for one in panel.points}):
            mark = {"color": COLOURS["far"], "marker": DOTS[kind], "ls": "none"}
            found.append((mark, kind))
    if panel.bars:
        square = {"marker": "s", "ls": "none", "ms": 8}
        names = dict.fromkeys(name for bar in panel.bars for name, _ in bar.parts)
        found += [({**square, "color": PARTS[name]}, name) for name in names]
    single = [one for one in panel.points if one.high == one.low]
    for bound in dict.fromkeys(one.bound for one in single):
        name = f"published, {bound}" if bound else "published"
        found.append(({**PUBLISHED, "marker": LIMITS[bound]}, name))
    if len(single) < len(panel.points):
        found.append(({"color": "black", "lw": 2.2}, "published, range"))
        if not panel.rows:
            found.append(({"color": "0.35", "marker": "o", "ls": "none"}, "predicted, mean"))
    if panel.given:
        found.append((GIVEN, "published, starts the curves"))
    return found


def draw_panel(axes: Any, panel: Panel) -> None:
    """One set of axes with its title and its key."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    draw = _rows if panel.rows else _bars if panel.bars else _curves
    draw(axes, panel)
    axes.set_title(panel.title)
    for limits, setting in ((panel.x_range, axes.set_xlim), (panel.y_range, axes.set_ylim)):
        if limits is not None:
            setting(*limits)
    lines, names = axes.get_legend_handles_labels()
    for mark, name in _key(panel):
        lines.append(Line2D([], [], **mark))
        names.append(name)
    below = ScaledTranslation(0, -BELOW / 72, axes.get_figure(root=True).dpi_scale_trans)
    axes.legend(
        lines, names, loc="upper center", bbox_to_anchor=(0.5, 0),
        bbox_transform=axes.transAxes + below, ncols=4 if panel.rows or panel.bars else 2,
    )  # fmt: skip


def _strips(panels: Sequence[Panel]) -> list[tuple[list[Panel], float]]:
    """Panels that stand side by side, with their height; rows and bars take the whole width."""
    found: list[tuple[list[Panel], float]] = []
    for panel in panels:
        if panel.rows or panel.bars:
            lines = len(panel.bars) * BAR or len(panel.points) * ROW
            found.append(([panel], KEY + lines))
        elif found and found[-1][1] == HEIGHT and len(found[-1][0]) < 2:
            found[-1][0].append(panel)
        else:
            found.append(([panel], HEIGHT))
    return found


def draw_paper(paper: Paper, file: Path) -> None:
    """Writes the figure of a paper."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    strips = _strips(paper.panels())
    heights = [height for _, height in strips]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)))
        figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
        parts = figure.subfigures(len(strips), height_ratios=heights, squeeze=False)[:, 0]
        for part, (panels, _) in zip(parts, strips, strict=True):
            beside = part.subplots(1, len(panels), squeeze=False)[0]
            for axes, panel in zip(beside, panels, strict=True):
                draw_panel(axes, panel)
        figure.suptitle(f"{paper.title}. {paper.cited}", fontsize=9, x=0.01, ha="left")
        _save(figure, file, drawn(paper))


def ratios(papers: Sequence[Paper]) -> list[tuple[str, float]]:
    """All numbers of the overview: the panel, and how far off one of its points is."""
    panels = (panel for paper in papers for panel in paper.panels())
    return [(panel.title, one.error) for panel in panels for one in panel.points]


def draw_overview(papers: Sequence[Paper], file: Path) -> None:
    """Writes predicted over published for every published number, a line a panel."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    groups = [(paper, panel) for paper in papers for panel in paper.panels() if panel.points]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.3 * len(groups) + 1.2), layout="constrained")
        axes = figure.subplots()
        band = axes.axvspan(1 - CLOSE, 1 + CLOSE, color=COLOURS["remote"], alpha=0.14, lw=0)
        axes.axvline(1, color="0.4", lw=0.9)
        for row, (paper, panel) in enumerate(groups):
            if row == 0 or groups[row - 1][0] is not paper:
                axes.axhline(row - 0.5, color="0.75", lw=0.8)
                author = paper.cited.partition(",")[0]
                axes.text(MOST + 0.12, row, f"{author}, {paper.name}", va="center")
            for one in panel.points:
                _ratio(axes, row, one)
        axes.set_yticks(range(len(groups)), [panel.title for _, panel in groups])
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.set_xlim(-0.06, MOST + 0.06)
        axes.set_xlabel(f"predicted or simulated over published (arrow: more than {MOST:g})")
        axes.grid(axis="x")
        marks = {
            "predicted": {"marker": "o", "color": "0.35"},
            "simulated": {"marker": "s", "color": "0.35"},
            "further off": {"marker": "o", "color": COLOURS["far"]},
        }
        lines = [Line2D([], [], ls="none", **mark) for mark in marks.values()]  # type: ignore[arg-type]
        names = [*marks, f"within {100 * CLOSE:.0f} % of published"]
        figure.legend([*lines, band], names, loc="outside lower center", ncols=4)
        _save(
            figure, file, [(panel.title, one.error) for _, panel in groups for one in panel.points]
        )


def _ratio(axes: Any, row: int, one: Point) -> None:
    ratio = 1 + one.error
    mark = DOTS[one.kind] if ratio <= MOST else ">"
    colour = COLOURS["near" if abs(one.error) <= CLOSE else "far"]
    axes.plot(min(ratio, MOST), row, mark, color=colour, ms=7, alpha=0.75)


def _save(figure: Any, file: Path, numbers: Any) -> None:
    """Writes a PNG of few colours, which carries the fingerprint of its numbers."""
    from PIL import Image, PngImagePlugin  # matplotlib needs Pillow

    drawing, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawing, format="png", dpi=90)
    carried = PngImagePlugin.PngInfo()
    carried.add_text("Description", fingerprint(numbers))
    with Image.open(drawing) as picture:
        picture.convert("RGB").quantize(SHADES).save(small, "PNG", optimize=True, pnginfo=carried)
    write_bytes(file, small.getvalue())
