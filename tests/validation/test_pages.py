from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.validation import pages


def walk(weights: list[int], count: int, capacities: list[int]) -> list[int]:
    """Weighted round robin one page at a time, as a kernel does it."""
    placed = [0] * len(weights)
    while count > 0:
        before = count
        for node, weight in enumerate(weights):
            for _ in range(weight):
                if count > 0 and placed[node] < capacities[node]:
                    placed[node] += 1
                    count -= 1
        if count == before:
            break
    return placed


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=4),
    st.integers(0, 120),
)
def test_weighted_pages_equal_a_walk_page_by_page(nodes: list[tuple[int, int]], count: int) -> None:
    weights = [weight for weight, _ in nodes]
    capacities = [capacity for _, capacity in nodes]
    if any(weights) or count == 0:
        found = pages.weighted_pages(weights, count, capacity_pages=capacities)
        assert list(found) == walk(weights, count, capacities)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any), st.integers(0, 200))
def test_weighted_pages_without_limits_place_every_page(weights: list[int], count: int) -> None:
    assert sum(pages.weighted_pages(weights, count)) == count


def test_weighted_pages_of_a_tebibyte_of_pages_are_counted_not_walked() -> None:
    assert pages.weighted_pages([3, 1], 4 * 10**12) == (3 * 10**12, 10**12)


def test_weighted_pages_with_every_node_full_leave_the_rest_unplaced() -> None:
    assert pages.weighted_pages([1, 1], 400, capacity_pages=[196, 128]) == (196, 128)


def test_weighted_pages_with_no_weight_raise_only_when_there_are_pages() -> None:
    assert pages.weighted_pages([0, 0], 0) == (0, 0)
    with pytest.raises(ValueError, match="no node with a weight"):
        pages.weighted_pages([0, 0], 1)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5), st.floats(0, 1))
def test_spread_evenly_conserves_and_only_full_nodes_have_less(
    capacities: list[int], filled: float
) -> None:
    amount = sum(capacities) * filled
    placed = pages.spread_evenly(amount, capacities)
    assert sum(placed) == pytest.approx(amount)
    most = max(placed)
    for got, capacity in zip(placed, capacities, strict=True):
        assert got <= capacity + 1e-9
        assert got == pytest.approx(most) or got == pytest.approx(capacity)


def test_spread_evenly_matches_round_robin_of_many_pages() -> None:
    walked = pages.weighted_pages([1, 1, 1], 45000, capacity_pages=[19600, 19600, 12800])
    placed = pages.spread_evenly(45000, [19600, 19600, 12800])
    assert placed == pytest.approx(walked, abs=1)


def test_spread_evenly_of_too_much_raises() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pages.spread_evenly(10, [4, 5])


@given(st.lists(st.floats(10, 1000), min_size=1, max_size=6))
def test_inverse_latency_shares_times_latency_are_equal(latencies: list[float]) -> None:
    shares = pages.inverse_latency_shares(latencies)
    products = [share * latency for share, latency in zip(shares, latencies, strict=True)]
    assert sum(shares) == pytest.approx(1)
    assert products == pytest.approx([products[0]] * len(products))


def test_local_first_of_what_fits_locally_leaves_the_remote_nodes_empty() -> None:
    assert pages.local_first(30, [100, 150], local_capacity=50, local_fill_fraction=0.9) == (
        30,
        0,
        0,
    )
