"""Changes of phase: how soon a tuner recovers, and what a share for each phase gains.

Every step time is *simulated* (:class:`cxl_offload.sim.step_time.TwoTierStep`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.tune import PhaseTuner, TierRatios, Window, cycle_shares
from cxl_offload.tune.curves import SHARES

STEPS = 20
SETTLE = 15
"""Decisions before the workload changes."""

RECOVER = 10
"""Decisions that may pass after it."""

CYCLES = 15
CLOSE = 0.03
WORTH = 0.02
"""Phases differ where a share for each gains this much over the best that is the same in all."""


@dataclass(frozen=True)
class Pair:
    """Two workloads on one machine, and what is known of it."""

    steps: tuple[TwoTierStep, TwoTierStep]
    ratios: TierRatios


class Noisy:
    """Windows of a workload."""

    def __init__(self, step: TwoTierStep, seed: int, noise: float) -> None:
        self.curve = dict(zip(SHARES, step.curve(SHARES).tolist(), strict=True))
        self._step = step
        self._draw = np.random.default_rng(seed)
        self._noise = noise

    def seconds(self, share: float) -> float:
        if share not in self.curve:
            self.curve[share] = self._step.seconds(share)
        return self.curve[share]

    def window(self, share: float) -> Window:
        noise = 1 + self._noise * self._draw.standard_normal(STEPS)
        return Window.of(self.seconds(share) * np.maximum(noise, 0.2))


def decisions_to_recover(pair: Pair, tuner: Any, seed: int, noise: float) -> int:
    """Decisions after the change until the step stays within 3 % of the best."""
    first, second = (Noisy(step, seed + at, noise) for at, step in enumerate(pair.steps))
    for _ in range(SETTLE):
        tuner.decide(first.window(tuner.share))
    best = min(second.curve[share] for share in SHARES)
    good = [
        second.seconds(tuner.decide(second.window(tuner.share)).share) <= (1 + CLOSE) * best
        for _ in range(SETTLE)
    ]
    settled = len(good)
    while settled and good[settled - 1]:
        settled -= 1
    return settled + 1


def recovered(
    pairs: list[Pair], make: Callable[[Pair, int], Any], noise: float
) -> dict[str, float]:
    """How many pairs a tuner recovers in, and after how many decisions."""
    taken = [
        decisions_to_recover(pair, make(pair, at), 31 * at, noise) for at, pair in enumerate(pairs)
    ]
    return {
        "recovered_within_10": sum(one <= RECOVER for one in taken) / len(taken),
        "mean_decisions": float(np.mean(taken)),
    }


def _truth(pair: Pair, steps: tuple[int, int]) -> NDArray[np.float64]:
    return np.array(
        [step.curve(SHARES) * count for step, count in zip(pair.steps, steps, strict=True)]
    )


def gained_by_phase(pair: Pair, seed: int, noise: float) -> float | None:
    """Part of what a share for each phase can gain that the tuner gains; None where they are alike.

    A phase lasts until it takes a second, and moving everything takes a hundredth of a cycle.
    """
    names = ("first", "second")
    counts = tuple(max(1, round(1.0 / min(step.curve(SHARES)))) for step in pair.steps)
    truth = _truth(pair, counts)  # type: ignore[arg-type]
    move_s = 0.01 * float(truth.min(axis=1).sum())
    best = cycle_shares(truth, whole_move_s=move_s)
    can_gain = best.fixed_seconds - best.seconds
    if can_gain < WORTH * best.fixed_seconds:
        return None
    runs = dict(
        zip(names, (Noisy(step, seed + at, noise) for at, step in enumerate(pair.steps)),
            strict=True)
    )  # fmt: skip
    tuner = PhaseTuner(pair.ratios, names, whole_move_s=move_s)
    for _ in range(CYCLES):
        windows = {name: run.window(tuner.shares[name]) for name, run in runs.items()}
        tuner.decide(windows, dict(zip(names, counts, strict=True)))
    at = [SHARES.index(tuner.shares[name]) for name in names]
    moved = 2 * abs(SHARES[at[0]] - SHARES[at[1]]) * move_s
    last = float(truth[0, at[0]] + truth[1, at[1]] + moved)
    return (best.fixed_seconds - last) / can_gain


def gains(pairs: list[Pair], noise: float) -> dict[str, float]:
    """Over all pairs whose phases differ: what the tuner gains of what can be gained."""
    found = [
        one
        for at, pair in enumerate(pairs)
        if (one := gained_by_phase(pair, 57 * at, noise)) is not None
    ]
    return {
        "pairs_that_differ": float(len(found)),
        "gained_mean": float(np.mean(found)),
        "gained_80_percent": sum(one >= 0.8 for one in found) / len(found),
    }
