"""Exact arithmetic for rules that turn on a tie: 10 % of 100 is 10, also for floats."""

from __future__ import annotations

from fractions import Fraction


def exact(value: float) -> Fraction:
    """``value`` as the decimal it was written as: ``exact(0.1)`` is 1/10, not 0.1000...0055.

    A capacity of 320 GiB used to 0.9 holds exactly 288 GiB, a share of 0.1 of 100 exactly 10; in
    binary floating point such comparisons fall to either side.

    Raises
    ------
    OverflowError, ValueError
        ``value`` is infinite or not a number.
    """
    if isinstance(value, int):
        return Fraction(value)
    as_float = float(value)
    if as_float != as_float or as_float in (float("inf"), float("-inf")):
        raise ValueError(f"{value!r} is not a finite number")
    return Fraction(repr(as_float))
