"""Pictures of numbers: bars of shares, lines over axes, lanes of a timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.report.page import escaped, shortened
from cxl_offload.units import format_seconds

TIER_COLOURS = ("gpu", "ldram", "rdram", "cxl", "hbm", "nvme")
_SERIES = 6
_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 46
_LANE = 26
_LANE_LETTERS = 16
_LEAST_GAP = 0.5
"""Pixels: bars of one kind that are closer are drawn as one."""
_LEAST_SCALE = 0.75
"""On a narrow screen a picture shrinks so far, so that its words can be read, then scrolls."""


@dataclass(frozen=True, slots=True)
class LaneBar:
    """Something that a lane of a timeline did, from when to when."""

    lane: str
    name: str
    start: float
    end: float

    @property
    def key(self) -> tuple[str, str]:
        """What bars have in common that may be drawn as one."""
        return self.lane, self.name


def colour_of(name: str, names: Sequence[str]) -> str:
    """The colour of a tier by its name; that of any other name by its place among ``names``.

    What is no tier never has the colour of one.
    """
    if name in TIER_COLOURS:
        return f"var(--{name})"
    return f"var(--s{list(names).index(name) % _SERIES})"


def legend(names: Sequence[str]) -> str:
    """Names beside their colours."""
    keys = "".join(
        f'<span class="key" style="background:{colour_of(name, names)}"></span>{escaped(name)}'
        for name in names
    )
    return f'<p class="dim">{keys}</p>'


def share_bar(parts: Mapping[str, float], names: Sequence[str], scale: float | None = None) -> str:
    """One bar, divided in proportion; ``scale`` is what would fill all of it."""
    whole = scale or sum(parts.values())
    if not whole:
        return ""
    cells = "".join(
        f'<i style="width:{100 * value / whole:.3f}%;background:{colour_of(name, names)}" '
        f'title="{escaped(name)}"></i>'
        for name, value in parts.items()
        if value > 0
    )
    return f'<div class="bar">{cells}</div>'


def plain_bar(value: float, most: float) -> str:
    """One bar of one thing, beside others as long as ``most``; its words stand beside it."""
    if value <= 0 or most <= 0:
        return ""
    cell = f'<i style="width:{100 * value / most:.3f}%;background:var(--plain)"></i>'
    return f'<div class="bar">{cell}</div>'


def _ticks(most: float) -> list[float]:
    """About four round numbers from 0 to ``most``."""
    step = 10.0 ** math.floor(math.log10(most / 4)) if most > 0 else 1.0
    step *= next((f for f in (1, 2, 5, 10) if most / (step * f) <= 5), 10)
    return [step * at for at in range(int(most / step + 1e-9) + 1)]


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str
) -> str:
    """Lines with dots over linear axes that begin at 0; nothing without points."""
    points = [point for each in series.values() for point in each]
    if not points:
        return ""
    most_x = max(x for x, _ in points) or 1.0
    most_y = max(y for _, y in points) * 1.05 or 1.0
    plot_w, plot_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + plot_w * x / most_x, _TOP + plot_h * (1 - y / most_y)

    parts = []
    for tick in _ticks(most_y):
        _, y = at(0, tick)
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="var(--line)"/>'
            f'<text class="d" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in _ticks(most_x):
        x, _ = at(tick, 0)
        parts.append(
            f'<text class="d" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{tick:g}</text>'
        )
    names = list(series)
    for name, each in series.items():
        colour = colour_of(name, names)
        placed = [at(x, y) for x, y in each]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
    middle = _LEFT + plot_w / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escaped(x_label)}</text>'
        f'<text x="14" y="{_TOP + plot_h / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {_TOP + plot_h / 2})">{escaped(y_label)}</text>'
    )
    return _picture(_WIDTH, _HEIGHT, parts, f"{y_label} over {x_label}") + legend(names)


def lanes(bars: Sequence[LaneBar]) -> str:
    """A row a lane, a bar an event, times in seconds; colours by what the bytes are."""
    if not bars:
        return ""
    begin, end = min(bar.start for bar in bars), max(bar.end for bar in bars)
    span = (end - begin) or 1.0
    rows = list(dict.fromkeys(bar.lane for bar in bars))
    names = list(dict.fromkeys(bar.name for bar in bars))
    label, width = 116, 760
    height = _LANE * len(rows) + 34
    parts = []
    for number, row in enumerate(rows):
        y = number * _LANE + 4
        parts.append(
            f'<text x="0" y="{y + 14}">{escaped(shortened(row, _LANE_LETTERS))}</text>'
            f'<path d="M{label} {y + _LANE - 4}H{width}" stroke="var(--line)"/>'
        )
    for bar in _joined(bars, _LEAST_GAP * span / (width - label)):
        x = label + (width - label) * (bar.start - begin) / span
        length = max((width - label) * (bar.end - bar.start) / span, 0.6)
        y = rows.index(bar.lane) * _LANE + 4
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="{_LANE - 8}" '
            f'fill="{colour_of(bar.name, names)}"><title>{escaped(bar.name)}</title></rect>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = label + (width - label) * share
        anchor = "end" if share == 1 else "middle"
        parts.append(
            f'<text class="d" x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}">'
            f"{escaped(format_seconds(span * share))}</text>"
        )
    return _picture(width, height, parts, "timeline") + legend(names)


def _joined(bars: Sequence[LaneBar], gap: float) -> list[LaneBar]:
    """The same picture of fewer bars: those of a kind in a lane that leave less than ``gap``."""
    made: list[LaneBar] = []
    last: dict[tuple[str, str], int] = {}
    for bar in sorted(bars, key=lambda each: each.start):
        before = last.get(bar.key)
        if before is not None and bar.start - made[before].end < gap:
            made[before] = replace(made[before], end=max(made[before].end, bar.end))
            continue
        last[bar.key] = len(made)
        made.append(bar)
    return made


def _picture(width: int, height: int, parts: Sequence[str], name: str) -> str:
    return (
        f'<div class="wide"><svg role="img" aria-label="{escaped(name)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" '
        f'style="min-width:{_LEAST_SCALE * width:.0f}px">{"".join(parts)}</svg></div>'
    )


def boxes_picture(width: int, height: int, parts: Sequence[str], name: str) -> str:
    """An SVG of parts that were made elsewhere."""
    return _picture(width, height, parts, name)
