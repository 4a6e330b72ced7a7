"""What is asked of a benchmark's ratios, and the verdicts that it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.measurements import Ratio

By = Literal["low", "median"]
_TOLD: dict[By, str] = {"low": "by the lower end", "median": "by the median"}


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked of a ratio.

    Attributes
    ----------
    asked
        Of what.
    ratio
        What was found.
    least
        What it has to reach; 1 asks for not slower.
    by
        What of the ratio has to reach it: the lower end of its 95 % interval, or its median.
    """

    asked: str
    ratio: Ratio
    least: float
    by: By = "low"

    @property
    def judged(self) -> float:
        return self.ratio.low if self.by == "low" else self.ratio.median

    @property
    def met(self) -> bool:
        return self.judged >= self.least

    def __str__(self) -> str:
        found = f"{self.ratio.median:.2f} [{self.ratio.low:.2f}, {self.ratio.high:.2f}]"
        verdict = "met" if self.met else "MISSED"
        return f"| {self.asked} | {self.least:g} {_TOLD[self.by]} | {found} | {verdict} |"


def print_bars(bars: Sequence[Bar]) -> bool:
    """A row for each, what is farthest below its bar first; whether all are met."""
    if bars:
        print("\n| bar | at least | found | |\n|---|---|---|---|")
    for bar in sorted(bars, key=lambda bar: bar.judged / bar.least):
        print(bar)
    return all(bar.met for bar in bars)
