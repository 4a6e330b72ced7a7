"""How far a command is and how long it still takes: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

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
from rich.table import Column

from cxl_offload.units import format_seconds

T = TypeVar("T")
Tell = Callable[[str, int, int], None]
"""Takes a label, how many are done and how many there are."""

_BAR_WIDTH = 16
"""Leaves half of 80 columns to the label."""

_QUIET_S = 10.0
"""Seconds after which somebody who reads no terminal hears where it is."""

_STAGES = {"convert": "converting weights", "load": "loading layers", "generate": "tokens"}


@contextlib.contextmanager
def progress_bar(
    *,
    keep: bool = True,
    lines: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Tell]:
    """Bars on stderr; where stderr is no terminal a line every ten seconds.

    Every stage of a run has a bar of its own; other labels take turns beside one bar.

    Parameters
    ----------
    keep
        Whether bars stay on the terminal when all is done.
    lines
        False where whoever reads the output is a program.
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
    in_lines = _QuietLines(console, clock) if silent and lines else None
    with Progress(
        *columns, console=console, disable=silent, expand=True, transient=not keep
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(label: str, done: int, total: int) -> None:
            stage = label if label in _STAGES else ""
            description = _STAGES.get(label, label)
            if in_lines is not None:
                in_lines.tell(stage, description, done, total)
            if stage not in tasks:
                tasks[stage] = bar.add_task("", total=total)
            bar.update(tasks[stage], description=description, completed=done, total=total)

        yield tell


def counted(items: Sequence[T], label: str, tell: Tell) -> Iterator[T]:
    """The items; before each, ``tell`` hears how many were done."""
    for done, item in enumerate(items):
        tell(label, done, len(items))
        yield item
    tell(label, len(items), len(items))


class _QuietLines:
    """A line where nothing was said for a while."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._said = clock()
        self._begun: dict[str, tuple[float, int]] = {}

    def tell(self, stage: str, label: str, done: int, total: int) -> None:
        """Says it if it is time to, with the time left by the speed of the stage so far."""
        now = self._clock()
        began, before = self._begun.setdefault(stage, (now, done))
        if now - self._said < _QUIET_S:
            return
        self._said = now
        left = ""
        if before < done < total:
            seconds = (now - began) * (total - done) / (done - before)
            left = f"; about {format_seconds(seconds)} left"
        self._console.print(f"{label}: {done} of {total}{left}", soft_wrap=True, markup=False)
