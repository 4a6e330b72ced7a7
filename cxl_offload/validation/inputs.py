"""Strict reading of a case's inputs: every key known, every number of its kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cxl_offload.files import hint

OneOf = TypeVar("OneOf", bound=str)
T = TypeVar("T")


def known_keys(where: str, values: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses a key that the model does not have, naming it and the closest known one."""
    for key in values:
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {where}; {hint(key, sorted(known))}")


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of one case (or an object inside them, ``where`` says which)."""

    values: Mapping[str, object]
    where: str = "inputs"

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _value(self, key: str) -> object:
        if self.values.get(key) is None:
            raise ValueError(f"{key!r} is missing in {self.where}")
        return self.values[key]

    def number(
        self, key: str, *, low: float = 0.0, above: bool = False, high: float = math.inf
    ) -> float:
        """A number, at least (``above``: more than) ``low`` and at most ``high``."""
        return self._checked(key, self._value(key), low=low, above=above, high=high)

    def _checked(
        self, key: str, value: object, *, low: float, above: bool, high: float = math.inf
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} = {value!r} in {self.where}, want a number")
        if not math.isfinite(value):
            raise ValueError(f"{key} = {value!r} in {self.where}, want a finite number")
        if value < low or (above and value == low) or value > high:
            least = f"above {low:g}" if above else f">= {low:g}"
            most = "" if high == math.inf else f" and <= {high:g}"
            raise ValueError(f"{key} = {value:g} in {self.where}, want {least}{most}")
        return value

    def optional_number(self, key: str, *, above: bool = False) -> float | None:
        """A number >= 0 (``above``: more than 0), or None where the key is absent."""
        return self.number(key, above=above) if key in self else None

    def fraction(self, key: str) -> float:
        """A number from 0 to 1."""
        return self.number(key, high=1.0)

    def integer(self, key: str, *, low: int = 0, default: int | None = None) -> int:
        """A whole number >= ``low``."""
        if key not in self and default is not None:
            return default
        return self._whole(key, self.number(key, low=low))

    def _whole(self, key: str, value: float) -> int:
        if value != int(value):
            raise ValueError(f"{key} = {value:g} in {self.where}, want a whole number")
        return int(value)

    def boolean(self, key: str) -> bool:
        """true or false."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise ValueError(f"{key} = {value!r} in {self.where}, want true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Text."""
        if key not in self and default is not None:
            return default
        value = self._value(key)
        if not isinstance(value, str):
            raise ValueError(f"{key} = {value!r} in {self.where}, want text")
        return value

    def choice(self, key: str, choices: Sequence[OneOf], default: OneOf | None = None) -> OneOf:
        """One of ``choices``."""
        text = self.text(key, default)
        for known in choices:
            if text == known:
                return known
        raise ValueError(f"{key} = {text!r} in {self.where}, want {', '.join(choices)}")

    def items(self, key: str) -> list[object]:
        """A list."""
        value = self._value(key)
        if not isinstance(value, list):
            raise ValueError(f"{key} = {value!r} in {self.where}, want a list")
        return value

    def numbers(self, key: str, *, above: bool = False, length: int | None = None) -> list[float]:
        """A list of numbers >= 0 (``above``: more than 0)."""
        items = self.items(key)
        if length is not None and len(items) != length:
            raise ValueError(f"{key} in {self.where} has {len(items)} entries, want {length}")
        return [self._checked(key, item, low=0.0, above=above) for item in items]

    def signed(self, key: str) -> float:
        """Any finite number."""
        return self.number(key, low=-math.inf)

    def signed_numbers(self, key: str) -> list[float]:
        """A list of finite numbers."""
        return [self._checked(key, item, low=-math.inf, above=False) for item in self.items(key)]

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers >= 0."""
        return [self._whole(key, number) for number in self.numbers(key)]

    def booleans(self, key: str) -> list[bool]:
        """A list of true or false."""
        return self._all_of(key, bool, "true or false")

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        return self._all_of(key, str, "texts")

    def _all_of(self, key: str, kind: type[T], what: str) -> list[T]:
        items = self.items(key)
        found = [item for item in items if isinstance(item, kind)]
        if len(found) != len(items):
            raise ValueError(f"{key} = {items!r} in {self.where}, want a list of {what}")
        return found

    def nested(self, key: str, known: Sequence[str] | None = None) -> Inputs:
        """An object inside; ``known`` are its keys, None for free names (tiers, endpoints)."""
        return self._nested(self._value(key), f"{key} of {self.where}", known)

    def nested_list(self, key: str, known: Sequence[str] | None = None) -> list[Inputs]:
        """A list of objects."""
        return [
            self._nested(item, f"{key}[{index}] of {self.where}", known)
            for index, item in enumerate(self.items(key))
        ]

    def _nested(self, value: object, where: str, known: Sequence[str] | None) -> Inputs:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {value!r}, want an object")
        if known is not None:
            known_keys(where, value, known)
        return Inputs(value, where)

    def named_numbers(self, key: str, *, above: bool = False) -> dict[str, float]:
        """An object of numbers >= 0 by free names, in the order of the file."""
        inner = self.nested(key)
        return {name: inner.number(name, above=above) for name in inner.values}
