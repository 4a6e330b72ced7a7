from __future__ import annotations

from cxl_offload.tune.caption import (
    CaptionRule,
    CaptionState,
    tune,
)

RULE = CaptionRule(min_abs_step=9, lowest_ratio=0, highest_ratio=100)


def test_equal_state_counts_as_improvement() -> None:
    assert tune(RULE, CaptionState(1.0, 20, 40), 1.0) == CaptionState(1.0, 20, 60)


def test_worse_state_turns_round_with_half_the_step_and_not_below_the_floor() -> None:
    assert tune(RULE, CaptionState(1.0, 40, 60), 0.9).step == -20
    assert tune(RULE, CaptionState(1.0, -12, 60), 0.9).step == 9


def test_step_survives_a_clamped_ratio() -> None:
    assert tune(RULE, CaptionState(1.0, 20, 95), 1.5) == CaptionState(1.5, 20, 100)
