"""Shares of resources: by hand, and by the definition of max-min fairness."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .machines import speeds


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


def every_fair_sharing(demands: list[dict[int, float]]) -> list[list[float]]:
    """Oracle: try every choice of a bottleneck (or none) for each event.

    A choice makes the shares that resources grant a system of linear equations; a solution counts
    if it overloads nothing and gives nobody less than others at its bottleneck.
    """
    shares = [{r: s / max(d.values()) for r, s in d.items()} for d in demands]
    resources = sorted({resource for share in shares for resource in share})
    found = []
    for choice in itertools.product(*[[None, *share] for share in shares]):
        used = sorted({resource for resource in choice if resource is not None})
        matrix, right = np.zeros((len(used), len(used))), np.ones(len(used))
        for row, resource in enumerate(used):
            for share, bottleneck in zip(shares, choice, strict=True):
                part = share.get(resource, 0.0)
                if bottleneck is None:
                    right[row] -= part
                else:
                    matrix[row, used.index(bottleneck)] += part / share[bottleneck]
        if used and abs(np.linalg.det(matrix)) < 1e-9:
            continue
        levels = dict(zip(used, np.linalg.solve(matrix, right) if used else [], strict=True))
        each = [
            1.0 if bottleneck is None else levels[bottleneck] / share[bottleneck]
            for share, bottleneck in zip(shares, choice, strict=True)
        ]
        parts = {
            resource: [s.get(resource, 0.0) * v for s, v in zip(shares, each, strict=True)]
            for resource in resources
        }
        if (
            all(0 < speed <= 1 + 1e-9 for speed in each)
            and all(sum(of_resource) <= 1 + 1e-9 for of_resource in parts.values())
            and all(levels[r] >= max(parts[r]) - 1e-9 for r in used)
        ):
            found.append(each)
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 2), st.floats(0.05, 5), min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_speeds_are_a_fair_sharing_found_by_trying_every_bottleneck(
    demands: list[dict[int, float]],
) -> None:
    found = speeds(demands)
    possible = every_fair_sharing(demands)
    assert possible
    assert any(found == pytest.approx(each, abs=1e-6) for each in possible)
