"""Caption's rule over many periods."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.tune.caption import CaptionRule, CaptionState
from cxl_offload.validation.caption_replay import replay_on_bandwidth, replay_on_states

RULE = CaptionRule(min_abs_step=9, lowest_ratio=0, highest_ratio=100)


@given(st.lists(st.floats(0, 10), max_size=20), st.floats(-50, 50), st.floats(0, 100))
def test_ratios_stay_in_bounds_whatever_the_states(
    states: list[float], step: float, ratio: float
) -> None:
    ratios = replay_on_states(RULE, CaptionState(0.0, step, ratio), states)
    assert len(ratios) == len(states)
    assert all(0 <= ratio <= 100 for ratio in ratios)


def test_period_without_allocations_changes_nothing_for_the_next() -> None:
    start = CaptionState(0.0, 20, 10)
    ratios = replay_on_states(RULE, start, [1.0, 5.0, 1.0], new_allocations=[True, False, True])
    assert ratios == (30, 50, 50)  # the third period still compares with 1.0 and starts from 30


@pytest.mark.parametrize(("dram", "cxl"), [(3.4, 1.0), (2.0, 1.0), (1.1, 1.0), (10.0, 1.0)])
def test_closed_loop_circles_the_best_share_of_the_bandwidth_law(dram: float, cxl: float) -> None:
    ratios = replay_on_bandwidth(RULE, CaptionState(0.0, 9, 0), (dram, cxl), 60)
    best = 100 * cxl / (dram + cxl)
    assert min(ratios[30:]) <= best <= max(ratios[30:])
    assert max(ratios[30:]) - min(ratios[30:]) <= 3 * 9


def test_closed_loop_with_too_few_allocation_flags_raises() -> None:
    with pytest.raises(ValueError, match="3 periods and 1"):
        replay_on_bandwidth(RULE, CaptionState(0, 9, 0), (2, 1), 3, new_allocations=[True])
