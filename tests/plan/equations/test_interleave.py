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


def law(bandwidth: list[float], weights: tuple[int, ...]) -> float:
    """The bandwidth bound from first principles: time until the slowest tier is done."""
    slowest = max(w / sum(weights) / b for w, b in zip(weights, bandwidth, strict=True))
    return 1 / slowest


@given(st.lists(rates, min_size=2, max_size=3), st.integers(1, 12))
def test_best_weights_equal_brute_force_of_every_grid(bandwidth: list[float], total: int) -> None:
    best = interleave.best_weights(bandwidth, total=total)
    highest = max(law(bandwidth, weights) for weights in every_weights(len(bandwidth), total))
    assert sum(best) == total
    assert law(bandwidth, best) == pytest.approx(highest, rel=1e-12)


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
def test_optimal_shares_saturate_every_tier_at_once(bandwidth: list[float]) -> None:
    shares = interleave.optimal_shares(bandwidth)
    assert interleave.bandwidth_bound(bandwidth, shares) == pytest.approx(sum(bandwidth))


@given(
    st.lists(rates, min_size=2, max_size=2),
    st.lists(st.integers(50, 500).map(float), min_size=2, max_size=2),
    st.floats(0, 1),
    st.floats(1, 1e4),
)
def test_interleaved_bandwidth_never_exceeds_tiers_or_littles_law(
    bandwidth: list[float], latency: list[float], on_second: float, lines: float
) -> None:
    shares = (1 - on_second, on_second)
    reached = interleave.interleaved_bandwidth(
        [b * 1e9 for b in bandwidth], shares, latency_ns=latency, lines_in_flight=lines
    )
    for rate, share in zip(bandwidth, shares, strict=True):
        assert reached * share <= rate * 1e9 * (1 + 1e-9)
    mean_ns = latency[0] * shares[0] + latency[1] * shares[1]
    assert reached / 64 * mean_ns * 1e-9 <= lines * (1 + 1e-9)  # lines in flight of that rate


def test_concurrency_bound_of_one_line_is_one_line_a_latency() -> None:
    bound = interleave.concurrency_bound([100.0], [1.0], lines_in_flight=1)
    assert bound == pytest.approx(64 / 100e-9)


def test_interleaved_bandwidth_with_half_of_the_concurrency_inputs_raises() -> None:
    with pytest.raises(ValueError, match="belong together"):
        interleave.interleaved_bandwidth([1.0], [1.0], latency_ns=[100.0])


def test_latency_factor_with_slower_second_tier_falls_with_its_share() -> None:
    factors = [interleave.latency_factor([111, 229], (1 - f, f)) for f in (0, 0.1, 0.5, 1)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(111 / 229)


def test_ratio_change_of_weights_without_cxl_before_is_the_whole_ratio() -> None:
    assert interleave.ratio_change((10, 0), (9, 1)) == 1
    assert interleave.ratio_change((7, 3), (7, 3)) == 0


@pytest.mark.parametrize(("old", "new"), [((1, 1), (1, 0)), ((0, 1), (1, 1))])
def test_ratio_change_that_is_unbounded_raises(old: tuple[int, int], new: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="unbounded"):
        interleave.ratio_change(old, new)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_shares_of_weights_that_place_nothing_raise(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        interleave.shares_of_weights(weights)
