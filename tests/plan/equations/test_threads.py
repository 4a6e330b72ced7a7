from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.plan.equations.threads import (
    ThreadedTier,
    assign_threads,
    saturating_threads,
    threaded_bandwidth,
    threads_for_bytes,
)

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


RATES = st.floats(1, 100)


@given(
    st.lists(st.tuples(RATES, RATES, st.sampled_from([0, 1, 5, 30])), min_size=1, max_size=3),
    st.integers(1, 8),
)
def test_threads_for_bytes_read_as_soon_as_the_best_of_every_assignment(
    given_tiers: list[tuple[float, float, int]], count: int
) -> None:
    tiers = [ThreadedTier(str(at), rate, peak) for at, (rate, peak, _) in enumerate(given_tiers)]
    nbytes = [each for *_, each in given_tiers]
    found = threads_for_bytes(tiers, nbytes, count)
    read = [at for at, each in enumerate(nbytes) if each]
    assert sum(found) == (count if read else 0)
    assert all(found[at] == 0 for at in range(len(tiers)) if at not in read)
    if not read or count < len(read):
        return

    def seconds(threads: Sequence[int]) -> float:
        return max(
            nbytes[at] / rate if (rate := threaded_bandwidth(tiers[at], threads[at])) else math.inf
            for at in read
        )

    every = itertools.product(range(count + 1), repeat=len(tiers))
    best = min(seconds(threads) for threads in every if sum(threads) <= count)
    assert seconds(found) == pytest.approx(best)


def test_threads_beyond_saturation_sit_on_the_first_tier_that_is_read() -> None:
    tiers = [ThreadedTier("ldram", 10, 100), ThreadedTier("cxl", 10, 25)]
    assert [saturating_threads(tier) for tier in tiers] == [10, 3]
    assert threads_for_bytes(tiers, [100, 25], 40) == (37, 3)
    assert threads_for_bytes(tiers, [0, 25], 40) == (0, 40)  # nothing else is read
    assert threads_for_bytes(tiers, [100, 25], 5) == (4, 1)
    assert threads_for_bytes(tiers, [100, 25], 1) == (1, 0)
    assert threads_for_bytes(tiers, [0, 0], 4) == (0, 0)
    with pytest.raises(ValueError, match="as many bytes as tiers"):
        threads_for_bytes(tiers, [1], 4)
