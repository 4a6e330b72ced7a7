"""The tables of a help: nothing is cut in them, however narrow the terminal is."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.table import Table
from rich.text import Text
from typer import rich_utils

_NAMES = slice(-6, -2)
"""Cells of a row of typer's: long and short names, and those that switch a flag off. Behind them
are what a value is, and what the option does."""


class _WholeNames(Table):
    """All names of an option in one column, which is as wide as the longest.

    rich narrows the widest columns alike, and cuts a name, which has no space to wrap at.
    """

    def add_row(self, *cells: Any, **options: Any) -> None:
        if names := cells[_NAMES]:  # no row of commands, which has a name and a help
            what, does = cells[_NAMES.stop :]
            named = Text("\n").join(name for name in names if name)
            cells = (*cells[: _NAMES.start], named, what, _folded(does))
        super().add_row(*cells, **options)
        for column in self.columns[:-2]:
            column.no_wrap = True


def _folded(does: Columns) -> Columns:
    """A help whose words are broken where one is wider than the column, and not cut."""
    for part in does.renderables:
        if isinstance(part, Text):
            part.overflow = "fold"
    return does


def keep_names_whole() -> None:
    """Has typer print every help from now on with such tables."""
    vars(rich_utils)["Table"] = _WholeNames
