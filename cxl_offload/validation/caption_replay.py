"""Caption's rule over many periods: on printed states, and in a loop of shares and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.equations.interleave import bandwidth_bound
from cxl_offload.tune.caption import CaptionRule, CaptionState, tune


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
