"""The kernel's list format, against a set-based oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.topology.cpulist import format_cpulist, parse_cpulist


@given(st.sets(st.integers(0, 5000), max_size=200))
def test_format_then_parse_gives_the_same_numbers(numbers: set[int]) -> None:
    assert parse_cpulist(format_cpulist(numbers)) == tuple(sorted(numbers))


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20)), max_size=20))
def test_parse_unites_ranges_in_any_order(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" for first, more in ranges)
    expected = {n for first, more in ranges for n in range(first, first + more + 1)}
    assert parse_cpulist(text) == tuple(sorted(expected))


@given(st.sets(st.integers(0, 40)))
def test_format_writes_no_two_ranges_that_touch(numbers: set[int]) -> None:
    parts = [
        tuple(map(int, part.split("-"))) for part in format_cpulist(numbers).split(",") if part
    ]
    ends, starts = [part[-1] for part in parts[:-1]], [part[0] for part in parts[1:]]
    assert all(start > end + 1 for end, start in zip(ends, starts, strict=True))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", ()), ("\n", ()), ("7\n", (7,)), ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11))],
)
def test_parse_reads_what_the_kernel_writes(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1 2", "0x3", "0-9999999999"])
def test_parse_refuses_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"list|range"):
        parse_cpulist(text)
