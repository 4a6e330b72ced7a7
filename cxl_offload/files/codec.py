"""Frozen dataclasses to JSON values and back, strictly: an unknown or missing key is an error.

The names of the fields are the format.
"""

from __future__ import annotations

import contextlib
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from cxl_offload.files.bounds import FieldError
from cxl_offload.files.document import CONTROL, hint, plain_key, shown

T = TypeVar("T")
Where = tuple[str | int, ...]
_MOST_DIGITS = 18
_HALVES = re.compile("[\ud800-\udfff]")
_TOO_LARGE = 1 << 63


class DecodeError(ValueError):
    """A JSON value that is not what its place asks for.

    Attributes
    ----------
    where
        Keys and list indices from the root to the value.
    """

    def __init__(self, message: str, where: Where) -> None:
        super().__init__(f"{path_text(where)}: {message}" if where else message)
        self.where = where


def path_text(where: Where) -> str:
    """``("paths", 0, "node")`` as ``"paths[0].node"``."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{plain_key(str(part))}"
    return text.lstrip(".")


def encode(value: Any) -> Any:
    """``value`` as what ``json.dumps`` takes; keys of mappings become text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: encode(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], value: Any) -> T:
    """The ``kind`` (a dataclass) that :func:`encode` made ``value`` of.

    Raises
    ------
    DecodeError
        With the place, for anything that is unknown, missing or of the wrong type, and for what
        the dataclass itself refuses.
    """
    return typing.cast(T, _decode(kind, value, ()))


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8 and shown: JSON can escape half a character alone."""
    return not (_HALVES.search(value) or CONTROL.search(value))


def _fail(expected: str, value: Any, where: Where) -> NoReturn:
    raise DecodeError(f"must be {expected}, not {shown(value)}", where)


def _decode(kind: Any, value: Any, where: Where) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            _fail("a list", value, where)
        return tuple(_decode(arguments[0], item, (*where, at)) for at, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            _fail("a mapping", value, where)
        return {
            _decode_key(arguments[0], key, where): _decode(arguments[1], item, (*where, key))
            for key, item in value.items()
        }
    if origin is Literal:
        if value not in arguments:
            _fail("one of " + ", ".join(map(repr, arguments)), value, where)
        return value
    if origin in (Union, types.UnionType):
        return _decode_union(arguments, value, where)
    return _decode_scalar(kind, value, where)


def _decode_union(kinds: tuple[Any, ...], value: Any, where: Where) -> Any:
    """The first that fits, in the order of the annotation."""
    if value is None and type(None) in kinds:
        return None
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with contextlib.suppress(DecodeError):
            return _decode(kind, value, where)
    return _decode(last, value, where)


def _decode_key(kind: Any, key: str, where: Where) -> Any:
    if kind is not int:
        return key
    if not key.isdecimal() or len(key) > _MOST_DIGITS:
        raise DecodeError(f"key {shown(key)} must be a whole number", where)
    return int(key)


def _decode_scalar(kind: Any, value: Any, where: Where) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [member.value for member in kind]
        return kind(value) if value in known else _fail(f"one of {known}", value, where)
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        _fail("a number of 64 bits", value, where)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else _fail("a finite number", value, where)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return value if is_text(value) else _fail("text that can be written", value, where)
    if kind is bool and isinstance(value, bool):
        return value
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
    _fail(names[kind], value, where)


def _decode_dataclass(kind: type, value: Any, where: Where) -> Any:
    if not isinstance(value, dict):
        _fail("a mapping of keys to values", value, where)
    hints = _hints(kind)
    known = {entry.name: entry for entry in fields(kind)}
    for key in value:
        if key not in known:
            raise DecodeError(f"unknown key {shown(key)}; {hint(key, known)}", (*where, key))
    for name, entry in known.items():
        if name not in value and _is_required(entry):
            raise DecodeError(f"key {name!r} is missing", where)
    arguments = {key: _decode(hints[key], item, (*where, key)) for key, item in value.items()}
    try:
        return kind(**arguments)
    except DecodeError:
        raise
    except FieldError as error:
        raise DecodeError(error.message, (*where, *error.where)) from error
    except ValueError as error:
        raise DecodeError(str(error), where) from error


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
