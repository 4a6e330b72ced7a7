"""Measuring steps inside a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, int, int], None]
"""Called with what is measured, how many steps are done and how many there are."""


SETUP = 2.0
"""Making a buffer takes about as long as two short measurements."""


@dataclass(frozen=True, slots=True)
class _Step:
    label: str
    run: Callable[[float], None]
    units: float


class Schedule:
    """Steps that share the time that is left.

    Parameters
    ----------
    budget_s
        Seconds for all steps. The last step begun may run over it by its own set-up.
    longest_s, shortest_s
        What one step gets at most; with less than ``shortest_s`` left for each of the remaining
        ones a step is skipped, for a number from no time is none.
    """

    def __init__(
        self,
        *,
        budget_s: float,
        longest_s: float,
        shortest_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget_s = budget_s
        self._longest_s = longest_s
        self._shortest_s = shortest_s
        self._clock = clock
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def budget_s(self) -> float:
        """Seconds after which no further step begins."""
        return self._budget_s

    @property
    def expected_s(self) -> float:
        """Seconds for all steps if set-up takes as long as was foreseen."""
        return min(self._budget_s, sum(step.units for step in self._steps) * self._longest_s)

    def add(self, label: str, run: Callable[[float], None], *, setup: float = 0.0) -> None:
        """Appends a step.

        Parameters
        ----------
        run
            Gets the seconds that its measuring should take.
        setup
            Time to keep free besides that for making buffers, in shares of an ordinary step.
        """
        self._steps.append(_Step(label, run, 1.0 + setup))

    def run(self, progress: Callable[[str], None] | None = None) -> tuple[str, ...]:
        """Runs the steps in order; ``progress`` hears of each before it begins.

        Returns
        -------
        tuple of str
            Labels of the steps that were skipped for lack of time.
        """
        end = self._clock() + self._budget_s
        skipped = []
        for at, step in enumerate(self._steps):
            if progress is not None:
                progress(step.label)
            share = (end - self._clock()) / sum(left.units for left in self._steps[at:])
            if share < self._shortest_s:
                skipped.append(step.label)
                continue
            step.run(min(share, self._longest_s))
        return tuple(skipped)
