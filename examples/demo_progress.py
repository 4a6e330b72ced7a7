"""What the demonstration is doing, which step of how many that is, and about how long is left.

On a terminal a bar shows each stage. Elsewhere every step is one plain line, and a step that takes
long says from time to time how far it is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

Tell = Callable[[str, int, int], None]
"""Takes what is done, how much of it is done, and how much there is."""

QUIET_S = 15.0
"""Seconds without a line, after which a log gets one."""

_STAGES = {"convert": "tensors converted", "load": "layers loaded", "generate": "tokens"}


class Steps:
    """The steps of a program, in their order.

    Parameters
    ----------
    console
        Where lines go.
    shares
        About how long each step takes, beside the others: only their proportions matter.
    clock
        Seconds, from any begin.
    """

    def __init__(
        self,
        console: Console,
        shares: Sequence[float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._shares = shares
        self._clock = clock
        self._begun = self._said = clock()
        self._at = 0

    @contextmanager
    def step(self, title: str) -> Iterator[Tell]:
        """Says that the next step begins; what it yields is told how far the step is."""
        if self._at == len(self._shares):
            raise ValueError(f"{title}: a step more than the {self._at} that were announced")
        number = f"[{self._at + 1}/{len(self._shares)}]"
        self._say(f"{number} {title}{self._left()}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        quiet = not self._console.is_terminal
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, disable=quiet, transient=True
        ) as bar:
            tasks = {}

            def tell(stage: str, done: int, total: int) -> None:
                name = _STAGES.get(stage, stage)
                if stage not in tasks:
                    tasks[stage] = bar.add_task(name, total=total)
                bar.update(tasks[stage], completed=done)
                if quiet and self._clock() - self._said >= QUIET_S:
                    self._say(f"{number} {name}: {done} of {total}{self._left()}")

            yield tell
        self._at += 1

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)
        self._said = self._clock()

    def _left(self) -> str:
        """From the time that the steps before took; nothing is known in the first."""
        done = sum(self._shares[: self._at])
        elapsed = self._clock() - self._begun
        if not done or not elapsed:
            return ""
        left = elapsed * sum(self._shares[self._at :]) / done
        shown = f"{math.ceil(left / 5) * 5} s" if left < 100 else f"{math.ceil(left / 60)} min"
        return f"; about {shown} left"
