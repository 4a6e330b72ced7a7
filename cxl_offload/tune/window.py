"""Step times since the last decision, and what they say.

A step time is one positive number of seconds. Before the mean is taken, outliers (a garbage
collection, another process) are limited to three median absolute deviations, so that one of them
does not decide. The standard error is that of the limited values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

_OUTLIER_DEVIATIONS = 3.0
SHORTEST_S, LONGEST_S = 1e-15, 1e20
"""No clock tells less, and the universe is younger. Squares of both are numbers still."""

_NORMAL_DEVIATION = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Window:
    """A number of steps under one policy.

    Attributes
    ----------
    mean_s
        Mean step time, in seconds.
    error
        Standard error of the mean, as a fraction of it.
    steps
        How many steps were measured.
    """

    mean_s: float
    error: float
    steps: int

    def __post_init__(self) -> None:
        sound = isinstance(self.steps, int) and self.steps >= 0
        numbers = all(isinstance(one, int | float) for one in (self.mean_s, self.error))
        if not sound or not numbers or not (_is_measured(self.mean_s) and self.error >= 0):
            raise ValueError(f"a window of {self.steps} steps of {self.mean_s} s +- {self.error}")

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Window:
        """The window of some step times.

        Raises
        ------
        ValueError
            No step, or a time outside of :data:`SHORTEST_S` to :data:`LONGEST_S`.
        """
        times = list(seconds)
        if not times or not all(map(_is_measured, times)):
            raise ValueError(
                f"{len(times)} step times: need at least one, all from {SHORTEST_S} to "
                f"{LONGEST_S} seconds"
            )
        middle = median(times)
        deviation = _NORMAL_DEVIATION * median(abs(time - middle) for time in times)
        if deviation > 0:
            reach = _OUTLIER_DEVIATIONS * deviation
            times = [min(max(time, middle - reach), middle + reach) for time in times]
        mean = fmean(times)
        if len(times) == 1:
            return cls(mean, math.inf, 1)
        spread = math.sqrt(sum((time - mean) ** 2 for time in times) / (len(times) - 1))
        return cls(mean, spread / math.sqrt(len(times)) / mean, len(times))


def _is_measured(seconds: float) -> bool:
    return SHORTEST_S <= seconds <= LONGEST_S


class StepSamples:
    """Collects steps until a decision can be made.

    The first steps after a change of policy are left out: they fault pages in and fill caches.

    Parameters
    ----------
    steps
        Steps of a window.
    warm_up
        Steps that are left out after :meth:`restart`.
    """

    __slots__ = ("_skip", "_times", "steps", "warm_up")

    def __init__(self, *, steps: int, warm_up: int) -> None:
        if steps < 2 or warm_up < 0:
            raise ValueError(f"a window of {steps} steps after {warm_up}: need at least 2 and 0")
        self.steps = steps
        self.warm_up = warm_up
        self._times: list[float] = []
        self._skip = warm_up

    def add(self, seconds: float) -> None:
        """One more step. What no clock can have measured (no time, or less) is left out."""
        if self._skip:
            self._skip -= 1
        elif _is_measured(seconds):
            self._times.append(seconds)

    @property
    def is_full(self) -> bool:
        """Whether there are enough steps for a decision."""
        return len(self._times) >= self.steps

    def take(self, *, policy_changed: bool) -> Window:
        """Returns the window so far and begins the next one, after a warm-up if the policy
        changed."""
        window = Window.of(self._times)
        self._times = []
        self._skip = self.warm_up if policy_changed else 0
        return window

    def restart(self) -> None:
        """Forgets what was collected: the policy changed in the middle of a window."""
        self._times = []
        self._skip = self.warm_up
