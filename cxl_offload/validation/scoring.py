"""Compares a prediction with what is published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cxl_offload.validation.casefile import Expectation

Predicted = float | int | bool | list[float] | list[int]

ROUNDING = 1e-12
"""Relative slack for the last bit of floating point, on bounds that have no tolerance."""


def score(predicted: object, expected: Expectation) -> tuple[bool, float | None]:
    """``(passes, error)``.

    The error is relative to the published value (absolute where that is 0), the largest of a
    list, the distance beyond a bound; None where no distance can be given (other type or length).
    """
    if expected.op == "equals":
        return _equals(predicted, expected.value)
    if expected.op == "vector_approx":
        return _vector(predicted, expected)
    if not _is_number(predicted):
        return False, None
    number = float(predicted)  # type: ignore[arg-type]
    if expected.op == "approx":
        value = float(expected.value)  # type: ignore[arg-type]
        return _near(number, value, expected.tolerance), _error(number, value)
    return _bounds(number, expected)


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _error(number: float, value: float) -> float:
    distance = abs(number - value)
    return distance / abs(value) if value else distance


def _near(number: float, value: float, tolerance: Mapping[str, float] | None) -> bool:
    allowed = tolerance or {}
    slack = ROUNDING * abs(value)
    if "factor" in allowed:
        low, high = sorted((value / allowed["factor"], value * allowed["factor"]))
        return low - slack <= number <= high + slack
    widest = max(allowed.get("rel", 0.0) * abs(value), allowed.get("abs", 0.0))
    return abs(number - value) <= widest + slack


def _vector(predicted: object, expected: Expectation) -> tuple[bool, float | None]:
    values: Sequence[float] = expected.value  # type: ignore[assignment]
    if not isinstance(predicted, list | tuple) or len(predicted) != len(values):
        return False, None
    if not all(_is_number(number) for number in predicted):
        return False, None
    pairs = list(zip(predicted, values, strict=True))
    passes = all(_near(number, value, expected.tolerance) for number, value in pairs)
    return passes, max((_error(number, value) for number, value in pairs), default=0.0)


def _bounds(number: float, expected: Expectation) -> tuple[bool, float | None]:
    widened = (expected.tolerance or {}).get("abs", 0.0)
    bound = None if expected.op == "range" else float(expected.value)  # type: ignore[arg-type]
    low = {"range": expected.low, "at_least": bound}.get(expected.op)
    high = {"range": expected.high, "at_most": bound}.get(expected.op)
    beyond = 0.0
    passes = True
    if low is not None and number < low - widened:
        passes = number >= low - widened - ROUNDING * abs(low)
        beyond = low - number
    if high is not None and number > high + widened:
        passes = number <= high + widened + ROUNDING * abs(high)
        beyond = number - high
    return passes, beyond


def _equals(predicted: object, value: object) -> tuple[bool, float | None]:
    if isinstance(value, list):
        if not isinstance(predicted, list | tuple) or len(predicted) != len(value):
            return False, None
        each = [_equals(item, wanted) for item, wanted in zip(predicted, value, strict=True)]
        errors = [error for _, error in each if error is not None]
        known = max(errors, default=0.0) if len(errors) == len(each) else None
        return all(passes for passes, _ in each), known
    if isinstance(value, bool) or isinstance(predicted, bool):
        same = isinstance(value, bool) and isinstance(predicted, bool) and value == predicted
        return same, 0.0 if same else None
    if not _is_number(value) or not _is_number(predicted):
        return predicted == value, 0.0 if predicted == value else None
    number, wanted = float(predicted), float(value)  # type: ignore[arg-type]
    return number == wanted, _error(number, wanted)
