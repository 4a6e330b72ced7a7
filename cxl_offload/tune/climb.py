"""Caption's hill climbing: as its listing prints it, and with what its text adds.

Source: Sun et al., Demystifying CXL Memory with Genuine CXL-Ready Systems, 6.1, Algorithm 1.
docs/adr/0008 lists what the listing leaves open, and how it is settled here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.tune.caption import CaptionRule, CaptionState, tune
from cxl_offload.tune.decision import FAR_WEIGHTS, Bounds, Decision, check_share, share_of_weight
from cxl_offload.tune.state_file import DAMAGED
from cxl_offload.tune.window import Window


class PublishedCaption:
    """Algorithm 1 on the share in per cent, the state being steps a second.

    Parameters
    ----------
    start_step
        First step, in per cent of the pages.
    rule
        Floor of the step and bounds of the share, in per cent.
    """

    def __init__(
        self,
        *,
        start_step: float = 9.0,
        rule: CaptionRule = CaptionRule(min_abs_step=9.0, lowest_ratio=0.0, highest_ratio=100.0),  # noqa: B008 - frozen
    ) -> None:
        self._rule = rule
        self._state = CaptionState(state=-math.inf, step=start_step, ratio=rule.lowest_ratio)

    @property
    def share(self) -> float:
        return self._state.ratio / 100.0

    def decide(self, window: Window, bounds: Bounds = Bounds()) -> Decision:  # noqa: B008
        before = self._state
        lowest = max(self._rule.lowest_ratio, 100.0 * bounds.lowest)
        highest = min(self._rule.highest_ratio, 100.0 * bounds.highest)
        rule = replace(self._rule, lowest_ratio=lowest, highest_ratio=highest)
        self._state = tune(rule, before, 1.0 / window.mean_s)
        went = "slower, so half a step back" if self._state.step != before.step else "not slower"
        return Decision(self.share, f"{went}: {before.ratio:.0f} -> {self._state.ratio:.0f} %")

    def hold(self, share: float) -> None:
        check_share(share)
        self._state = replace(self._state, ratio=100.0 * share)

    def saved(self) -> dict[str, Any]:
        state = asdict(self._state)
        return {"tuner": "caption", **{k: v for k, v in state.items() if math.isfinite(v)}}

    def restore(self, saved: dict[str, Any]) -> None:
        if saved.get("tuner") != "caption" or not {"step", "ratio"} <= set(saved):
            raise ConfigError("the saved state is not that of the tuner 'caption'")
        try:
            state = CaptionState(
                state=float(saved.get("state", -math.inf)),
                step=float(saved["step"]),
                ratio=float(saved["ratio"]),
            )
            check_share(state.ratio / 100.0)
            if math.isnan(state.state) or not math.isfinite(state.step):
                raise ValueError("state")
            self._state = state
        except DAMAGED as problem:
            raise ConfigError("the saved state is not that of the tuner 'caption'") from problem


@dataclass(frozen=True, slots=True)
class ClimbRule:
    """What does not change while climbing. Steps are whole weights of the far tier.

    Attributes
    ----------
    first_step, least_step
        Steps of the weight. Arriving at the least step also ends a search.
    evidence
        Standard errors by which two windows must differ to count as different.
    dead_band
        A relative difference below this counts as none, however certain it is.
    reset
        If the time of an unchanged weight changes by this fraction, it is another workload.
    """

    first_step: int = 3
    least_step: int = 1
    evidence: float = 1.0
    dead_band: float = 0.005
    reset: float = 0.2


@dataclass(frozen=True, slots=True)
class ClimbState:
    """What one decision hands to the next: the weight in force, the one before, and its window."""

    weight: int = 0
    step: int = 3
    previous_weight: int = 0
    previous: Window | None = None


def climb(rule: ClimbRule, state: ClimbState, window: Window) -> tuple[ClimbState, str]:
    """One decision: the next state and the reason.

    If steps are faster than before, take the same step again. If they are slower, go half as far in
    the other direction, at least ``least_step``. If no difference can be told, stay, and go on in
    least steps. If the time of an unchanged weight jumped, it is another workload: begin again from
    the near tier alone.
    """
    before = state.previous
    if before is None:
        weight = min(state.weight + rule.first_step, FAR_WEIGHTS[-1])
        start = replace(
            state,
            weight=weight,
            step=rule.first_step,
            previous_weight=state.weight,
            previous=window,
        )
        return start, f"first step: weight {state.weight} -> {weight}"
    change = before.mean_s / window.mean_s - 1.0  # above 0: faster now
    if state.weight == state.previous_weight and abs(change) > rule.reset:
        fresh = ClimbState(step=rule.first_step)
        return fresh, f"step time jumped by {-change:+.0%} with nothing changed: begin again"
    noise = math.hypot(before.error, window.error)
    if abs(change) <= max(rule.dead_band, rule.evidence * noise):
        least = int(math.copysign(rule.least_step, state.step))
        return (
            ClimbState(state.weight, least, state.weight, window),
            f"no difference that can be told ({change:+.1%}, noise {noise:.1%}): stay",
        )
    step = state.step
    if change < 0:
        half = math.copysign(max(abs(step) // 2, rule.least_step), -step)
        step = int(half)
    weight = min(max(state.weight + step, FAR_WEIGHTS[0]), FAR_WEIGHTS[-1])
    verdict = "slower" if change < 0 else "faster"
    reason = f"{verdict} by {abs(change):.1%}: weight {state.weight} -> {weight}"
    return ClimbState(weight, step, state.weight, window), reason


def _allowed(weight: int, bounds: Bounds) -> int:
    """The allowed weight that is closest to ``weight``. If none is allowed, the one closest to
    being so."""

    def distance(one: int) -> tuple[float, int]:
        share = share_of_weight(one)
        return abs(share - bounds.clamp(share)), abs(one - weight)

    return min(FAR_WEIGHTS, key=distance)


class Climb:
    """Hill climbing on whole weights, 10 near to 0 .. 20 far, with evidence asked for."""

    def __init__(self, rule: ClimbRule = ClimbRule()) -> None:
        self._rule = rule
        self._state = ClimbState(step=rule.first_step)

    @property
    def share(self) -> float:
        return share_of_weight(self._state.weight)

    def decide(self, window: Window, bounds: Bounds = Bounds()) -> Decision:  # noqa: B008
        before = self._state.weight
        state, reason = climb(self._rule, self._state, window)
        self._state = replace(state, weight=_allowed(state.weight, bounds))
        return Decision(self.share, reason, settled=before == self._state.weight)

    def hold(self, share: float) -> None:
        self._state = replace(self._state, weight=_allowed(0, Bounds(share, share)))

    def saved(self) -> dict[str, Any]:
        return {"tuner": "climb", **asdict(self._state)}

    def restore(self, saved: dict[str, Any]) -> None:
        try:
            if saved["tuner"] != "climb" or int(saved["weight"]) not in FAR_WEIGHTS:
                raise KeyError("tuner")
            window = saved["previous"]
            self._state = ClimbState(
                weight=int(saved["weight"]),
                step=int(saved["step"]),
                previous_weight=int(saved["previous_weight"]),
                previous=None if window is None else Window(**window),
            )
        except DAMAGED as problem:
            raise ConfigError("the saved state is not that of the tuner 'climb'") from problem
