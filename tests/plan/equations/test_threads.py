from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations.threads import (
    ThreadedTier,
    saturating_threads,
    threaded_bandwidth,
    threads_for_bytes,
)

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
