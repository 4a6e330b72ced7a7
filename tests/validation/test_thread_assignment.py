"""Threads over tiers, against every assignment."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.plan.equations.threads import ThreadedTier, threaded_bandwidth
from cxl_offload.validation.thread_assignment import assign_threads

tiers_strategy = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 60)), min_size=1, max_size=3
).map(lambda pairs: [ThreadedTier(str(i), rate, peak) for i, (rate, peak) in enumerate(pairs)])


def total(tiers: list[ThreadedTier], threads: tuple[int, ...]) -> float:
    return sum(map(threaded_bandwidth, tiers, threads))


@settings(max_examples=60)
@given(tiers_strategy, st.integers(0, 12))
def test_assign_threads_equal_the_first_best_of_every_assignment(
    tiers: list[ThreadedTier], count: int
) -> None:
    assigned = assign_threads(tiers, count)
    every = [
        threads
        for threads in itertools.product(range(count + 1), repeat=len(tiers))
        if sum(threads) == count
    ]
    highest = max(total(tiers, threads) for threads in every)
    assert total(tiers, assigned) == highest
    assert assigned == max(threads for threads in every if total(tiers, threads) == highest)


def test_assign_threads_beyond_saturation_go_to_the_first_tier() -> None:
    tiers = [ThreadedTier("ldram", 10, 30), ThreadedTier("cxl", 5, 10)]
    assert assign_threads(tiers, 100) == (98, 2)


def test_assign_threads_with_decimal_rates_see_an_exact_peak() -> None:
    # 3 x 0.1 is 0.3 here, so that the fourth thread gains nothing on the first tier
    tiers = [ThreadedTier("a", 0.1, 0.3), ThreadedTier("b", 1e-20, 1)]
    assert assign_threads(tiers, 4) == (3, 1)


def test_assign_threads_to_no_tier_raise() -> None:
    with pytest.raises(ValueError, match="0 tiers"):
        assign_threads([], 3)
