"""What bench_plan measures: plans against every configuration of a grid, with limited memory.

A case is a model with lengths and the most memory that it may have. Its plan runs, and so does
every point of a grid, which the integrations' own modules make (regret_transformers.py,
regret_flexgen.py).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.topology import Machine

NEAR = 0.85
"""Points slower than this share of the fastest after one run are not run again."""

_FIRST, _TURNS = 0.5, 0.8
"""Shares of a case's time after which no new point, and no new turn of the near ones, begins."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration: how it is called, and a run of it that gives tokens/s."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A plan among the points of its grid; ``planned`` is one of them."""

    name: str
    planned: Point
    predicted: float
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share; ``now`` is the clock of runs."""

    machine: Machine
    operators: OperatorProfile
    folder: Path
    quick: bool
    now: Callable[[], float]

    @property
    def hidden(self) -> int:
        """Width of both models."""
        return 512 if self.quick else 1024

    @property
    def layers(self) -> int:
        """Layers of both models."""
        return 2 if self.quick else 4


def regret_of(case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Runs a case for about so many seconds; a row of the table.

    Every point runs once, those that are near the fastest in turns after that. Then the plan and
    the fastest point run in turns again: of many points one is fastest by chance, which runs made
    after the choice do not repeat. The regret is their median ratio. Points for which the time is
    too short are not run; they are drawn, and the row says how many ran.
    """
    begun = time.monotonic()
    case.planned.run()  # the first of a case makes threads, kernels and pages
    rates = {case.planned.name: [case.planned.run()]}
    others = [point for point in case.points if point is not case.planned]
    random.Random(0).shuffle(others)
    for point in others:
        if time.monotonic() - begun > seconds * _FIRST:
            break
        rates[point.name] = [point.run()]
    ran = [point for point in case.points if point.name in rates]
    best = max(each[0] for each in rates.values())
    near = [p for p in ran if p is case.planned or rates[p.name][0] >= NEAR * best]
    for _ in range(rounds - 1):
        if time.monotonic() - begun > seconds * _TURNS:
            break
        for point in near:
            rates[point.name].append(point.run())
    fastest = max(near, key=lambda point: statistics.median(rates[point.name]))
    pairs = [(1.0, 1.0)]
    if fastest is not case.planned:
        pairs = [_pair(case.planned, fastest, 0)]
        for turn in range(1, rounds):
            if time.monotonic() - begun < seconds:
                pairs.append(_pair(case.planned, fastest, turn))
    return {
        "case": case.name,
        "planned": case.planned.name,
        "best": fastest.name,
        "points": len(ran),
        "predicted_tokens_per_s": case.predicted,
        "measured_tokens_per_s": statistics.median(rates[case.planned.name]),
        "regret": max(0.0, statistics.median(best / plan for plan, best in pairs) - 1),
        "rates": rates,
    }


def _pair(planned: Point, other: Point, turn: int) -> tuple[float, float]:
    """Tokens/s of both, who is first by turns."""
    if turn % 2:
        second = other.run()
        return planned.run(), second
    return planned.run(), other.run()


def thread_counts() -> tuple[int, ...]:
    """All, and one."""
    return tuple(dict.fromkeys((torch.get_num_threads(), 1)))


def with_threads(threads: int, run: Callable[[], float]) -> float:
    """Runs with so many threads of torch."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(usual)
