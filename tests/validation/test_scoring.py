from __future__ import annotations

import pytest

from cxl_offload.validation.casefile import Expectation
from cxl_offload.validation.scoring import score


def approx(value: object, **tolerance: float) -> Expectation:
    op = "vector_approx" if isinstance(value, list) else "approx"
    return Expectation(op, value=value, tolerance=tolerance)


@pytest.mark.parametrize(
    ("predicted", "expected", "passes"),
    [
        (102.0, approx(100, rel=0.02), True),
        (102.1, approx(100, rel=0.02), False),
        (-98.0, approx(-100, rel=0.02), True),
        (0.073, approx(0.0, abs=0.08), True),
        (50, approx(100, factor=2), True),
        (201, approx(100, factor=2), False),
        (100, approx(100), True),
        (100.001, approx(100), False),
        ([1.0, 2.2], approx([1, 2], rel=0.1), True),
        ([1.0, 2.3], approx([1, 2], rel=0.1), False),
        ([1.0], approx([1, 2], rel=0.1), False),
        (1.0, approx([1], rel=0.1), False),
        (float("nan"), approx(1, rel=9), False),
        (True, approx(1, rel=0.1), False),
        (5, Expectation("range", low=1, high=5), True),
        (5.4, Expectation("range", low=1, high=5, tolerance={"abs": 0.5}), True),
        (0.4, Expectation("range", low=1, high=5, tolerance={"abs": 0.5}), False),
        (1.0, Expectation("at_most", value=1.0), True),
        (1.1, Expectation("at_most", value=1.0), False),
        (0.92, Expectation("at_least", value=0.99, tolerance={"abs": 0.08}), True),
        (0.90, Expectation("at_least", value=0.99, tolerance={"abs": 0.08}), False),
        (14.0, Expectation("equals", value=14), True),
        (14.1, Expectation("equals", value=14), False),
        ([1, 2], Expectation("equals", value=[1, 2]), True),
        ([1, 2, 3], Expectation("equals", value=[1, 2]), False),
        (True, Expectation("equals", value=True), True),
        (1, Expectation("equals", value=True), False),
        (True, Expectation("equals", value=1), False),
    ],
)
def test_prediction_passes_within_its_tolerance_only(
    predicted: object, expected: Expectation, passes: bool
) -> None:
    assert score(predicted, expected)[0] is passes


def test_error_is_relative_or_the_distance_beyond_a_bound() -> None:
    assert score(110.0, approx(100, rel=0.2))[1] == pytest.approx(0.1)
    assert score(0.5, approx(0, abs=1))[1] == pytest.approx(0.5)
    assert score([1.0, 3.0], approx([1, 2], rel=1))[1] == pytest.approx(0.5)
    assert score(7, Expectation("range", low=1, high=5))[1] == pytest.approx(2)
    assert score(3, Expectation("range", low=1, high=5))[1] == 0
    assert score([1], approx([1, 2], rel=1))[1] is None
