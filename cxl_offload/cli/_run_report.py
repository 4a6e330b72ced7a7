"""What runs of all engines print: progress, speed by phase, and where the bytes are."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from cxl_offload.cli._report_table import NONE, lines, table
from cxl_offload.files import write_text
from cxl_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from cxl_offload.objects import PlacementRow

_BAR_WIDTH = 16
"""Leaves half of 80 columns to the label."""

_VERSION = 1
"""Of the form of every report in JSON; it grows when a key goes or changes its meaning."""

_STAGES = {"convert": "converting weights", "load": "loading layers", "generate": "tokens"}


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on stderr, silent when stderr is no terminal.

    What it yields takes a label, how many are done and how many there are. Every stage of a run has
    a bar of its own; other labels take turns beside one bar.
    """
    columns = (
        BarColumn(bar_width=_BAR_WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        # What a narrow terminal has no room for is the end of the label, never a number.
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),
    )
    console = Console(stderr=True)
    silent = not console.is_terminal
    with Progress(*columns, console=console, disable=silent, expand=True) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(label: str, done: int, total: int) -> None:
            stage = label if label in _STAGES else ""
            if stage not in tasks:
                tasks[stage] = bar.add_task("", total=total)
            description = _STAGES.get(label, label)
            bar.update(tasks[stage], description=description, completed=done, total=total)

        yield tell


def write_json(file: str, document: Mapping[str, Any]) -> None:
    """Writes a report with the version of its form, or prints it where the file is ``-``."""
    text = json.dumps({"version": _VERSION, **document}, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        write_text(file, text)


def speed_table(how: str, phases: Mapping[str, tuple[float | None, float]]) -> Table:
    """Tokens/s, where a phase makes tokens, and seconds of every phase; ``how`` they were found."""
    made = table(f"Speed ({how})", "phase", "tokens/s", "time", right=("tokens/s", "time"))
    for phase, (rate, seconds) in phases.items():
        made.add_row(phase, NONE if rate is None else f"{rate:.1f}", format_seconds(seconds))
    return made


def placement_table(rows: Iterable[PlacementRow], kind: str, *, simulated: bool) -> Table:
    """Requested against granted; ``kind`` is the heading of the first column."""
    pages = "pages of simulated nodes" if simulated else "read from the pages"
    title = f"Where the bytes are, at their peak (host memory: {pages})"
    headings = (kind, "part", "policy", "requested", "granted by node", "by tier")
    made = table(title, *headings, right=("requested",))
    for row in rows:
        made.add_row(
            row.kind,
            row.part,
            row.policy,
            format_bytes(row.requested_bytes),
            lines(f"{node}: {format_bytes(count)}" for node, count in row.granted.items()),
            lines(f"{name}: {format_bytes(count)}" for name, count in row.tiers.items()),
        )
    return made
