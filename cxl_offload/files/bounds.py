"""Numbers of dataclasses that are kept in files: no field takes one that nobody would write.

One rule for all of them, so that a new field has it too: a number, or each of a mapping, is finite
and 0 or more, unless its field says otherwise in its metadata (:func:`bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

_LEAST, _MOST = "least", "most"
_ROUNDED = 1e-5
"""Of the largest value: sums of parts are rounded."""


class FieldError(ValueError):
    """A value that a dataclass refuses.

    Attributes
    ----------
    message
        Without the name of the field.
    where
        The field, and the keys below it.
    """

    def __init__(self, message: str, where: tuple[str | int, ...]) -> None:
        super().__init__(f"{'.'.join(map(str, where))}: {message}")
        self.message = message
        self.where = where


def bounds(*, least: float = 0, most: float = math.inf) -> Mapping[str, float]:
    """The metadata of a field whose numbers lie from ``least`` to ``most``."""
    return {_LEAST: least, _MOST: most}


def check_numbers(value: Any) -> None:
    """Refuses the numbers of a dataclass that are outside of their bounds.

    Raises
    ------
    FieldError
        Names the field, what is expected and what there is.
    """
    for entry in fields(value):
        found = getattr(value, entry.name)
        least, most = entry.metadata.get(_LEAST, 0), entry.metadata.get(_MOST, math.inf)
        items = found.items() if isinstance(found, Mapping) else [(None, found)]
        for key, item in items:
            where = (entry.name,) if key is None else (entry.name, str(key))
            _check(item, least, most, where)


def _check(value: Any, least: float, most: float, where: tuple[str | int, ...]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise FieldError(f"must be a finite number, not {value}", where)
    if value < least:
        raise FieldError(f"must be at least {least:g}, not {value}", where)
    if value > most * (1 + _ROUNDED):
        raise FieldError(f"must be at most {most:g}, not {value}", where)
