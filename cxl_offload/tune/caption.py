"""Caption's hill climbing on the share of pages on CXL, as pure rules.

Source: Sun et al., Demystifying CXL Memory with Genuine CXL-Ready Systems, 6.1, Algorithm 1, with
the floor of the step from the text. Valid for a state that has one maximum over the ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CaptionRule:
    """What does not change while tuning. Ratios and steps are per cent of the pages on CXL."""

    min_abs_step: float
    lowest_ratio: float
    highest_ratio: float


@dataclass(frozen=True, slots=True)
class CaptionState:
    """What one period hands to the next."""

    state: float
    step: float
    ratio: float


def tune(rule: CaptionRule, previous: CaptionState, state: float) -> CaptionState:
    """One period: the ratio to set, with the state and the step that led to it.

    If the state is worse than before, the next step is half as long, in the other direction, and at
    least ``min_abs_step``. Otherwise the same step is taken again. The ratio is clamped, the step
    is not.
    """
    step = previous.step
    if state < previous.state:
        step = -0.5 * previous.step
        if abs(step) < rule.min_abs_step:
            step = math.copysign(rule.min_abs_step, step)
    ratio = min(max(previous.ratio + step, rule.lowest_ratio), rule.highest_ratio)
    return CaptionState(state=state, step=step, ratio=ratio)
