"""A tuner that begins with the machine's profile and corrects it by measured steps.

It needs fewer decisions than hill climbing, because a window at one share says something about all
others. It tries only shares that are unlikely to cost much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.errors import ConfigError
from cxl_offload.tune.belief import Belief, Measured
from cxl_offload.tune.curves import SHARES, Family, TierRatios, curve_family, nearest
from cxl_offload.tune.decision import Bounds, Decision
from cxl_offload.tune.state_file import DAMAGED
from cxl_offload.tune.window import Window

Regime = Literal["latency", "bandwidth", "capacity", "not memory", "unknown"]

_LEAST_MEMORY_PART = 0.15
"""If less of the step than this waits for memory, halving that time gains less than the error of a
fair guess of bandwidths. The regime is then called "not memory"."""


_MOST_DOUBTS = 8
"""For so many windows after the last try, a small gain is doubted. Not longer, because each doubt
moves pages."""

_MOST_LOG_S = 50.0
"""Largest logarithm of a saved step time: e^50 seconds are longer than the universe is old."""


@dataclass(frozen=True, slots=True)
class ModelRule:
    """What does not change while tuning.

    Attributes
    ----------
    worth
        A share is tried only if its expected gain is above this fraction of the step. The limit
        rises by as much with every window that found nothing to try: further windows of one share
        say little about others, so what they seem to promise is mostly noise.
    risk
        A share is tried only if its loss stays below this fraction of the step, with
        ``risk_confidence`` standard deviations.
    evidence
        The far tier stays in use only if it is better than the near tier alone by so many standard
        deviations.
    recheck
        For a share that gains less than ``recheck_gain``: if the near tier alone may be as good,
        within so many standard deviations, it is measured again before the share is kept.
    recheck_gain
        As a fraction of the step.
    jump
        If the step time of an unchanged share changes by more than this fraction, and by more than
        ``jump_evidence`` standard errors, it is another workload.
    """

    worth: float = 0.001
    risk: float = 0.25
    risk_confidence: float = 1.0
    evidence: float = 1.0
    recheck: float = 2.5
    recheck_gain: float = 0.02
    jump: float = 0.08
    jump_evidence: float = 4.0


class Record:
    """What was measured at each share, until the workload changes."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.measured: dict[int, Measured] = {}

    def note(self, at: int, window: Window, rule: ModelRule) -> bool:
        """Adds a window at share ``SHARES[at]``; True where the workload has changed."""
        new = Measured.of(window)
        known = self.measured.get(at)
        jumped = False
        if known is not None:
            change = abs(new.log_s - known.log_s)
            noise = math.sqrt(new.variance + known.variance)
            jumped = change > max(rule.jump, rule.jump_evidence * noise)
        if jumped:
            self.measured.clear()
            known = None
        self.measured[at] = new if known is None else known.and_then(new)
        return jumped

    def saved(self) -> dict[str, list[float]]:
        """What :meth:`restore` needs, as JSON."""
        return {str(at): [one.log_s, one.variance] for at, one in self.measured.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on where :meth:`saved` was called; raises ValueError or the like if damaged."""
        measured = {
            int(index): Measured(float(log_s), float(variance))
            for index, (log_s, variance) in saved.items()
        }
        if not all(0 <= index < len(SHARES) for index in measured) or not all(
            abs(one.log_s) < _MOST_LOG_S and 0 < one.variance < math.inf
            for one in measured.values()
        ):
            raise ValueError("measured")
        self.measured = measured

    def belief(self) -> Belief:
        """What the windows say of every share."""
        return Belief.from_measurements(self._family, self.measured)


def _expected_gain(advantage: Floats, deviation: Floats) -> Floats:
    """Mean of ``max(0, gain)`` for normal gains."""
    safe = np.maximum(deviation, 1e-12)
    z = advantage / safe
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])
    result: Floats = advantage * below + safe * density
    return result


def choose(
    belief: Belief, tried: set[int], rule: ModelRule, bounds: Bounds
) -> tuple[int, int, float]:
    """The best tried share, the untried one that promises most, and the gain expected of it.

    Shares are indices of :data:`~cxl_offload.tune.curves.SHARES`. If no tried share is within the
    bounds, the allowed share with the lowest expected time counts as the best.
    """
    allowed = np.array([bounds.lowest <= share <= bounds.highest for share in SHARES])
    if not allowed.any():
        middle = (bounds.lowest + bounds.highest) / 2
        allowed[min(range(len(SHARES)), key=lambda at: abs(SHARES[at] - middle))] = True
    possible = [at for at in sorted(tried) if allowed[at]] or list(np.flatnonzero(allowed))
    best = int(min(possible, key=lambda at: belief.log_s[at]))
    if best and allowed[0] and 0 in tried:
        doubt = rule.evidence * float(belief.deviation_against(0)[best])
        if belief.log_s[0] - belief.log_s[best] < doubt:
            best = 0
    deviation = belief.deviation_against(best)
    advantage = belief.log_s[best] - belief.log_s
    gain = _expected_gain(advantage, deviation)
    gain[list(tried)] = 0.0
    gain[~allowed] = 0.0
    gain[rule.risk_confidence * deviation - advantage > rule.risk] = 0.0
    try_next = int(np.argmax(gain))
    return best, try_next, float(gain[try_next])


class ModelTuner:
    """Tries the share with the largest expected gain until none is worth it.

    Parameters
    ----------
    ratios
        The far tier against the near one, of the machine's profile or file.
    rule
        What is worth a try.
    start
        The share in force at the beginning, for example the plan's.

    Attributes
    ----------
    ratios
        As given.
    """

    def __init__(
        self,
        ratios: TierRatios,
        rule: ModelRule = ModelRule(),
        *,
        start: float = 0.0,
    ) -> None:
        self.ratios = ratios
        self._rule = rule
        self._at = nearest(start)
        self._record = Record(curve_family(ratios))
        self._fits_near = True
        self._calm = 0  # windows in a row that found nothing to try

    @property
    def share(self) -> float:
        return SHARES[self._at]

    @property
    def regime(self) -> Regime:
        """What bounds the step with all pages near, as far as the windows tell.

        ``"capacity"`` if the near tier has no room for all of it, whatever the step waits for.
        """
        if not self._fits_near:
            return "capacity"
        if len(self._record.measured) < 2:
            return "unknown"
        belief = self._record.belief()
        if belief.memory_part < _LEAST_MEMORY_PART:
            return "not memory"
        return "bandwidth" if belief.pressure > 1.0 else "latency"

    def decide(self, window: Window, bounds: Bounds = Bounds()) -> Decision:  # noqa: B008 - frozen
        jumped = self._record.note(self._at, window, self._rule)
        self._fits_near = bounds.lowest <= 0.0
        belief = self._record.belief()
        best, try_next, gain = choose(belief, set(self._record.measured), self._rule, bounds)
        before = self.share
        self._calm = 0 if jumped else self._calm
        explore = gain > self._rule.worth * (1 + self._calm)
        self._calm = 0 if explore else self._calm + 1
        doubted = self._calm in range(1, _MOST_DOUBTS) and self._doubts(belief, best, bounds)
        self._at = try_next if explore else 0 if doubted else best
        what = f"{before:.0%} -> {self.share:.0%} far"
        if jumped:
            reason = f"{what}: another workload, step time is now {window.mean_s:.4g} s"
        elif explore:
            reason = f"{what}: may gain {gain:.1%}"
        elif doubted:
            reason = f"{what}: measures the near tier again, {SHARES[best]:.0%} is hardly better"
        elif best == 0:
            reason = f"{what}: the far tier gains nothing that can be told; leave it alone"
        else:
            reason = f"{what}: nothing better in sight"
            if 0 in self._record.measured:
                gained = 1.0 - math.exp(belief.log_s[best] - belief.log_s[0])
                reason += f", {gained:.1%} faster than the near tier alone"
        return Decision(self.share, reason, settled=not explore and not doubted)

    def _doubts(self, belief: Belief, best: int, bounds: Bounds) -> bool:
        """Whether the near tier alone may be as good as ``best`` and is to be measured again.

        Otherwise the noise of its only window would decide for ever, while the best share has had
        several.
        """
        measured = self._record.measured
        if best == 0 or 0 not in measured or bounds.lowest > 0 or best not in measured:
            return False
        gained = float(belief.log_s[0] - belief.log_s[best])
        unsure = gained < self._rule.recheck * float(belief.deviation_against(best)[0])
        noise = measured[0].variance
        return unsure and gained < self._rule.recheck_gain and noise > measured[best].variance

    def hold(self, share: float) -> None:
        self._at = nearest(share)

    @staticmethod
    def nearest(share: float) -> float:
        """The share of the grid that stands for ``share``."""
        return SHARES[nearest(share)]

    def saved(self) -> dict[str, Any]:
        return {
            "tuner": "model",
            "at": self._at,
            "calm": self._calm,
            "measured": self._record.saved(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        try:
            at, calm = int(saved["at"]), int(saved.get("calm", 0))
            if saved["tuner"] != "model" or not 0 <= at < len(SHARES) or calm < 0:
                raise ValueError("tuner")
            self._record.restore(saved["measured"])
        except DAMAGED as problem:
            raise ConfigError("the saved state is not that of the tuner 'model'") from problem
        self._at, self._calm = at, calm
