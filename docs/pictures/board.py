"""Draws the Grafana board as an SVG file: its own panels, with what a real Prometheus answered.

    python -m tests.metrics.record_board 240 docs/pictures/board_answers.json
    python docs/pictures/board.py [FOLDER]

It is no screenshot of Grafana: titles, places, units and legends are read from the board's file,
values from the recorded answers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from cxl_offload.units import format_bytes

HERE = Path(__file__).parent
BOARD = HERE.parents[1] / "configs" / "grafana" / "dashboards" / "cxl_offload.json"
ANSWERS = HERE / "board_answers.json"

WIDTH, EDGE, GAP = 760, 10, 8
COLUMN = (WIDTH - 2 * EDGE) / 24
ROW = 24.0
HEAD = 40
COLOURS = ("#0072b2", "#c8500a", "#0a7d4f", "#7a4fb5", "#b8860b", "#c2457c", "#5d646c", "#3f9fd6")
STYLE = """
 text { font: 11.5px system-ui, sans-serif; fill: #1c1e21 } .dim { fill: #5d646c }
 .title { font-weight: 600; font-size: 12.5px } .big { font-size: 19px; font-weight: 600 }
 .head { font-size: 15px; font-weight: 600 } .panel { fill: #ffffff; stroke: #d5d9de }
 .grid { stroke: #e6e9ec } .line { fill: none; stroke-width: 1.6 }
"""

Series = dict[str, Any]


def shown(value: float, unit: str) -> str:
    """A value as Grafana writes it in a unit of the board."""
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "Bps":
        for size, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} B/s"
    if unit == "percentunit":
        return f"{100 * value:.1f}%"
    return f"{value:.3g}" + (" ops/s" if unit == "ops" else "")


def ticks(top: float, unit: str) -> list[float]:
    """Three or four round numbers from zero to beyond ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    base = 2.0 if unit == "bytes" else 10.0
    steps = (1, 2, 4, 8) if base == 2 else (1, 2, 5, 10)
    size = base ** math.floor(math.log(top / 4, base))
    step = next((size * each for each in steps if size * each * 4 >= top), size * base)
    return [number * step for number in range(math.ceil(top / step) + 1)]


class Panel:
    """One panel in its place."""

    def __init__(self, panel: dict[str, Any], answers: dict[str, list[Series]]) -> None:
        self.panel = panel
        place = panel["gridPos"]
        self.x, self.y = EDGE + place["x"] * COLUMN + GAP / 2, HEAD + place["y"] * ROW + GAP / 2
        self.w, self.h = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
        defaults = panel["fieldConfig"]["defaults"]
        self.unit, self.none = defaults["unit"], defaults.get("noValue", "No data")
        self.stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        self.series = [
            (_legend(target.get("legendFormat", ""), series["labels"]), series)
            for target in panel["targets"]
            for series in answers[target["refId"]]
        ]
        self.parts: list[str] = []

    def draw(self, seconds: int) -> list[str]:
        self.parts.append(
            f'<rect class="panel" x="{self.x:.1f}" y="{self.y:.1f}" width="{self.w:.1f}" '
            f'height="{self.h:.1f}" rx="4"/>'
        )
        self.text(self.x + 8, self.y + 17, self.panel["title"], "title")
        draw: dict[str, Callable[[], None]] = {
            "stat": self.stat,
            "table": self.table,
            "timeseries": lambda: self.curves(seconds),
        }
        draw[self.panel["type"]]()
        return self.parts

    def text(
        self, x: float, y: float, line: str, look: str = "", anchor: str = "start", fill: str = ""
    ) -> None:
        colour = f' style="fill:{fill}"' if fill else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{look}" text-anchor="{anchor}"{colour}>'
            f"{escape(line)}</text>"
        )

    def stat(self) -> None:
        if not self.series:
            self.text(self.x + self.w / 2, self.y + self.h / 2 + 14, self.none, "dim", "middle")
        part = self.w / max(len(self.series), 1)
        for number, (name, series) in enumerate(self.series):
            middle = self.x + part * (number + 0.5)
            value = shown(series["points"][-1][1], self.unit)
            self.text(middle, self.y + self.h / 2 + 13, value, "big", "middle")
            self.text(middle, self.y + self.h - 10, name, "dim", "middle")

    def table(self) -> None:
        (organize,) = (each["options"] for each in self.panel["transformations"])
        hidden = organize["excludeByName"]
        labels = sorted({label for _, series in self.series for label in series["labels"]})
        columns = [label for label in labels if label not in hidden]
        cells = {
            column: [column, *(series["labels"].get(column, "") for _, series in self.series)]
            for column in columns
        }
        letters = {column: max(map(len, lines)) + 2 for column, lines in cells.items()}
        x = self.x + 8
        for column, lines in cells.items():
            for row, line in enumerate(lines):
                self.text(x, self.y + 42 + 20 * row, line, "" if row else "dim")
            x += (self.w - 16) * letters[column] / sum(letters.values())

    def curves(self, seconds: int) -> None:
        rows = self._legend_rows()
        left, right = self.x + 62, self.x + self.w - 10
        top, bottom = self.y + 30, self.y + self.h - 26 - 16 * len(rows)
        stacks = self._stacks()
        levels = ticks(
            max((high for _, points in stacks for _, _, high in points), default=0), self.unit
        )

        def place(at: float, value: float) -> str:
            x = right + at / seconds * (right - left)
            return f"{x:.1f} {bottom - value / levels[-1] * (bottom - top):.1f}"

        for level in levels:
            y = bottom - level / levels[-1] * (bottom - top)
            self.parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
            self.text(left - 6, y + 4, shown(level, self.unit), "dim", "end")
        for number, (_, points) in enumerate(stacks):
            colour = COLOURS[number % len(COLOURS)]
            line = "L".join(place(at, high) for at, _, high in points)
            if self.stacked and points:
                floor = "L".join(place(at, low) for at, low, _ in reversed(points))
                self.parts.append(
                    f'<path fill="{colour}" fill-opacity="0.3" d="M{line}L{floor}Z"/>'
                )
            self.parts.append(f'<path class="line" stroke="{colour}" d="M{line}"/>')
        for at in (-seconds, -seconds // 2, 0):
            anchor = {-seconds: "start", 0: "end"}.get(at, "middle")
            x = right + at / seconds * (right - left)
            self.text(x, bottom + 15, f"{-at // 60} min ago" if at else "now", "dim", anchor)
        for row, entries in enumerate(rows):
            for x, colour, line in entries:
                y = bottom + 34 + 16 * row
                self.parts.append(
                    f'<rect x="{x:.1f}" y="{y - 8:.1f}" width="10" height="4" fill="{colour}"/>'
                )
                self.text(x + 14, y, line, "dim")

    def _stacks(self) -> list[tuple[str, list[tuple[float, float, float]]]]:
        """Name, and (time, low, high) of each series: low is that of the one below, or zero."""
        below: dict[float, float] = {}
        found = []
        for name, series in self.series:
            points = []
            for at, value in series["points"]:
                low = below.get(at, 0.0) if self.stacked else 0.0
                points.append((at, low, low + value))
                below[at] = low + value
            found.append((name, points))
        return found

    def _legend_rows(self) -> list[list[tuple[float, str, str]]]:
        """Names with their last values, as many in a row as there is room for."""
        rows: list[list[tuple[float, str, str]]] = [[]]
        x = self.x + 10
        for number, (name, series) in enumerate(self.series):
            line = f"{name}  {shown(series['points'][-1][1], self.unit)}"
            width = 14 + 6.1 * len(line) + 12
            if rows[-1] and x + width > self.x + self.w:
                rows.append([])
                x = self.x + 10
            rows[-1].append((x, COLOURS[number % len(COLOURS)], line))
            x += width
        return rows


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), pattern)


def board() -> str:
    """The picture."""
    shape = json.loads(BOARD.read_text(encoding="utf-8"))
    recorded = json.loads(ANSWERS.read_text(encoding="utf-8"))
    answers: dict[int, dict[str, list[Series]]] = {}
    for each in recorded["answers"]:
        answers.setdefault(each["panel"], {})[each["target"]] = each["series"]
    parts = []
    for panel in shape["panels"]:
        parts += Panel(panel, answers[panel["id"]]).draw(recorded["seconds"])
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shape["panels"])
    height = round(HEAD + rows * ROW + EDGE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n'
        f"<title>{escape(shape['title'])}</title>\n<style>{STYLE}</style>\n"
        f'<rect fill="#f4f5f7" width="{WIDTH}" height="{height}"/>\n'
        f'<text class="head" x="{EDGE + 4}" y="26">{escape(shape["title"])}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    (folder / "board.svg").write_text(board(), encoding="utf-8")
