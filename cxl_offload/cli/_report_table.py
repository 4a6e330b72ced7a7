"""The look of the tables, and the marks on numbers that are bounds or assumptions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

from rich import box
from rich.console import Console, RenderableType
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine

NONE = "-"
WIDE = 140
"""Columns of the tables of a machine in a pipe."""

_BOUNDS = {"upper": "≤", "lower": "≥", None: ""}


def console_of(*, piped_width: int | None = None) -> Console:
    """Where tables go; names and paths are no markup.

    ``piped_width`` is that of a pipe or a file, which has none of its own.
    """
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = piped_width if piped else None
    return Console(markup=False, emoji=False, highlight=False, width=width)


class _Word(Text):
    """A word that is broken after a comma, if it is too long for its column."""

    def wrap(self, console: Console, width: int, *given: Any, **named: Any) -> Lines:
        rows = [""]
        for part in re.split(r"(?<=,)", self.plain):
            if rows[-1] and len(rows[-1]) + len(part) > width:
                rows.append("")
            rows[-1] += part
        return Text("\n".join(rows)).wrap(console, width, *given, **named)


class _Table(Table):
    """Policies are words with commas: one is broken behind them, as a reader would."""

    def add_row(self, *cells: RenderableType | None, **named: Any) -> None:
        words = (_Word(cell) if _is_list(cell) else cell for cell in cells)
        super().add_row(*words, **named)


def _is_list(cell: object) -> TypeGuard[str]:
    return isinstance(cell, str) and "," in cell and not re.search(r"\s", cell)


def table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table; ``right`` names the columns of numbers."""
    made = _Table(
        title=title,
        header_style="dim",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    numbers = set(right)
    for column in columns:
        justify = "right" if column in numbers else "left"
        made.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return made


def show(console: Console, made: Table) -> None:
    """Print a table below an empty line, unless it has no rows."""
    if not made.row_count:
        return
    # rich would break a title at the width of its table
    title, made.title = made.title, None
    console.print(Text(f"\n{title}", "bold"))
    console.print(made)


def lines(items: Iterable[str]) -> str:
    """Items below one another in a cell."""
    return "\n".join(items) or NONE


def or_none(value: int | None) -> str:
    """A number, or the sign for none."""
    return NONE if value is None else str(value)


def need_matplotlib(option: str, file: Path | None = None) -> None:
    """Refuses an option that draws where nothing can draw, before any work is done.

    Parameters
    ----------
    file
        The picture, where the option names one; its ending is a format.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib; install it, e.g. pip install matplotlib")
    if file is None or not file.suffix:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    if file.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(
            f"{option} {file}: no picture is written as {file.suffix}; end its name in .png, .svg "
            "or .pdf"
        )


class Marks:
    """Marks of the numbers of a machine file, by what they are; remembers whether any was used."""

    def __init__(self, machine: Machine) -> None:
        self._by_what = {citation.what: citation for citation in machine.citations}
        self._used = False

    def mark(self, what: str, text: str) -> str:
        """``text`` with the marks of the number called ``what``."""
        citation = self._by_what.get(what)
        if citation is None or text == NONE:
            return text
        marks = ("*" if citation.status == "assumed" else "") + _BOUNDS[citation.bound]
        self._used = self._used or bool(marks)
        return marks + text

    def explain(self, console: Console) -> None:
        """Print the legend if a mark was printed before."""
        if self._used:
            legend = "≤ upper bound   ≥ lower bound   * assumed; --sources says why"
            console.print(Text(f"\n{legend}", "dim"))
