from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations import interleave

rates = st.integers(1, 500).map(float)


def every_weights(tiers: int, total: int) -> list[tuple[int, ...]]:
    grid = itertools.product(range(total + 1), repeat=tiers)
    return [weights for weights in grid if sum(weights) == total]


def bound(bandwidth: list[float], weights: tuple[int, ...]) -> float:
    """The bandwidth bound from first principles: time until the slowest tier is done."""
    slowest = max(w / sum(weights) / b for w, b in zip(weights, bandwidth, strict=True))
    return 1 / slowest


@given(st.lists(rates, min_size=2, max_size=3), st.integers(1, 12))
def test_best_weights_equal_brute_force_of_every_grid(bandwidth: list[float], total: int) -> None:
    best = interleave.best_weights(bandwidth, total=total)
    highest = max(bound(bandwidth, weights) for weights in every_weights(len(bandwidth), total))
    assert sum(best) == total
    assert bound(bandwidth, best) == pytest.approx(highest, rel=1e-12)


def test_best_weights_on_a_tie_keep_pages_on_the_faster_tier() -> None:
    assert interleave.best_weights([100, 10, 10], total=10) == (10, 0, 0)
    assert interleave.best_weights([1, 1], total=3) == (2, 1)


def test_best_weights_leave_a_dead_tier_unused_at_any_total() -> None:
    assert interleave.best_weights([109, 0, 19], total=10**6)[1] == 0


@pytest.mark.parametrize(("bandwidth", "total"), [([0, 0], 4), ([1, 2], 0), ([], 3), ([1, -1], 2)])
def test_best_weights_without_a_solution_raise(bandwidth: list[float], total: int) -> None:
    with pytest.raises(ValueError, match="best weights"):
        interleave.best_weights(bandwidth, total=total)


@given(st.lists(rates, min_size=1, max_size=5))
def test_shares_by_bandwidth_saturate_every_tier_at_once(bandwidth: list[float]) -> None:
    shares = interleave.shares_of_weights(bandwidth)
    assert interleave.bandwidth_bound(bandwidth, shares) == pytest.approx(sum(bandwidth))


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_shares_of_weights_that_place_nothing_raise(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        interleave.shares_of_weights(weights)
