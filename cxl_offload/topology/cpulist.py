"""The kernel's list format for CPUs and nodes: ``"0-3,8,10-11"``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MAX_ID = 1 << 20  # far above any kernel's CPU or node count; keeps "0-4294967295" from filling RAM
_MAX_DIGITS = 20  # zeros before it


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list, ascending and unique; empty text is an empty list.

    Raises
    ------
    ValueError
        If the text is not such a list, or a range runs backwards.
    """
    numbers: set[int] = set()
    text = text.strip()
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list like '0-3,8': {part!r} is no number or range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if max(len(first), len(last)) > _MAX_DIGITS or not int(first) <= int(last) <= _MAX_ID:
            raise ValueError(f"{text!r}: range {part!r} runs backwards or is beyond {_MAX_ID}")
        numbers.update(range(int(first), int(last) + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """The kernel's list of these numbers: ``(0, 1, 2, 8)`` is ``"0-2,8"``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
