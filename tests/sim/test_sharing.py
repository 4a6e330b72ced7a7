"""Shares of resources: by hand, and by the definition of max-min fairness."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.sim.sharing import speeds


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ([{0: 1.0}], [1.0]),
        ([{0: 1.0}, {1: 5.0}], [1.0, 1.0]),
        ([{0: 1.0}, {0: 9.0}], [0.5, 0.5]),
        ([{0: 1.0}, {0: 1.0}, {0: 1.0}, {1: 1.0}], [1 / 3, 1 / 3, 1 / 3, 1.0]),
        # The second can use a quarter of resource 0 at most: the first gets the rest.
        ([{0: 1.0}, {0: 1.0, 1: 4.0}], [0.75, 1.0]),
        # Both need all of 0; the second also half of 1, where the third wants everything.
        ([{0: 2.0}, {0: 2.0, 1: 1.0}, {1: 3.0}], [0.5, 0.5, 0.75]),
        # Held back on 1 by two others, the first leaves more of 0 to the last.
        ([{0: 1.0, 1: 1.0}, {1: 1.0}, {1: 1.0}, {0: 1.0}], [1 / 3, 1 / 3, 1 / 3, 2 / 3]),
    ],
)
def test_shares_of_known_cases(demands: list[dict[int, float]], expected: list[float]) -> None:
    assert speeds(demands) == pytest.approx(expected)


DEMANDS = st.lists(
    st.dictionaries(st.integers(0, 4), st.floats(0.01, 10), min_size=1, max_size=4),
    min_size=1,
    max_size=7,
)


@settings(max_examples=300, deadline=None)
@given(DEMANDS)
def test_nobody_below_full_speed_has_less_than_others_on_its_bottleneck(
    demands: list[dict[int, float]],
) -> None:
    found = speeds(demands)
    used: dict[int, list[float]] = {}
    shares = [{r: s / max(d.values()) for r, s in d.items()} for d in demands]
    for share, speed in zip(shares, found, strict=True):
        assert 0 < speed <= 1
        for resource, part in share.items():
            used.setdefault(resource, []).append(speed * part)
    for parts in used.values():
        assert sum(parts) <= 1 + 1e-6
    for share, speed in zip(shares, found, strict=True):
        bottlenecks = [
            resource
            for resource, part in share.items()
            if sum(used[resource]) >= 1 - 1e-6 and speed * part >= max(used[resource]) - 1e-6
        ]
        assert speed == pytest.approx(1) or bottlenecks
