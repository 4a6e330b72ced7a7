from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations.oli import select_objects

objects_strategy = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 20)), min_size=0, max_size=8
)


@given(objects_strategy, st.integers(0, 10), st.integers(0, 9))
def test_selection_is_large_and_nothing_large_left_out_is_more_accessed(
    objects: list[tuple[int, int]], tenths: int, top_k: int
) -> None:
    sizes = [size for size, _ in objects]
    counts = [count for _, count in objects]
    chosen = select_objects(sizes, counts, min_share=tenths / 10, top_k=top_k)
    large = {i for i, size in enumerate(sizes) if size * 10 >= tenths * sum(sizes)}
    assert list(chosen) == sorted(set(chosen))
    assert set(chosen) <= large
    assert len(chosen) == min(top_k, len(large))
    for index in chosen:
        assert all(counts[index] >= counts[other] for other in large - set(chosen))


def test_object_of_exactly_the_share_counts_where_binary_floats_would_miss_it() -> None:
    assert 0.1 * (0.3 + 2.7) > 0.3
    assert select_objects([0.3, 2.7], [9, 1], min_share=0.1, top_k=1) == (0,)


def test_equal_accesses_choose_the_earlier_object() -> None:
    assert select_objects([1, 1, 1], [5, 5, 5], min_share=0, top_k=2) == (0, 1)


def test_no_objects_select_nothing() -> None:
    assert select_objects([], [], min_share=0.1, top_k=3) == ()


def test_lists_of_different_length_raise() -> None:
    with pytest.raises(ValueError, match="2 footprints and 1"):
        select_objects([1, 2], [1], min_share=0.1, top_k=1)
