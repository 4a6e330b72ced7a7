"""Caption's hill climbing on the share of pages on CXL, as pure rules.

Source: Sun et al., Demystifying CXL Memory with Genuine CXL-Ready Systems, 6.1, Algorithm 1, with
the floor of the step from the text. Valid for a state that has one maximum over the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.equations.interleave import bandwidth_bound


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


def replay_on_states(
    rule: CaptionRule,
    start: CaptionState,
    states: Sequence[float],
    *,
    new_allocations: Sequence[bool] | None = None,
) -> tuple[float, ...]:
    """The ratio set in every period for measured ``states``.

    In a period without new allocations the ratio is set, but the previous values stay. Weights
    steer new pages only, so such a period says nothing.
    """
    ratios = []
    previous = start
    allocated = [True] * len(states) if new_allocations is None else list(new_allocations)
    for state, has_new in zip(states, allocated, strict=True):
        current = tune(rule, previous, state)
        ratios.append(current.ratio)
        previous = current if has_new else previous
    return tuple(ratios)


def replay_on_bandwidth(
    rule: CaptionRule,
    start: CaptionState,
    bandwidth: tuple[float, float],
    periods: int,
    *,
    new_allocations: Sequence[bool] | None = None,
) -> tuple[float, ...]:
    """The same in a closed loop: the bandwidth equation gives the state at the ratio in force.

    ``bandwidth`` of [DRAM, CXL] in any one unit. The ratio in force is the last one set.
    """
    ratios: list[float] = []
    previous = start
    in_force = start.ratio
    allocated = [True] * periods if new_allocations is None else list(new_allocations)
    if len(allocated) != periods:
        raise ValueError(f"{periods} periods and {len(allocated)} entries of new_allocations")
    for has_new in allocated:
        on_cxl = in_force / 100.0
        state = bandwidth_bound(bandwidth, (1.0 - on_cxl, on_cxl))
        current = tune(rule, previous, state)
        in_force = current.ratio
        ratios.append(in_force)
        previous = current if has_new else previous
    return tuple(ratios)
