"""A machine as JSON and back, without loss: the field names of the model are the format."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from enum import Enum
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.topology.model import Machine

__all__ = ["machine_from_json", "machine_to_json"]


def machine_to_json(machine: Machine, *, indent: int | None = 2) -> str:
    """JSON with a stable order of keys; the same machine always gives the same text."""
    return json.dumps(_encode(machine), indent=indent, ensure_ascii=False)


def machine_from_json(text: str) -> Machine:
    """The machine of :func:`machine_to_json`'s text.

    Raises
    ------
    ConfigError
        If the text is not JSON, or not of a machine; the message names the field.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error}") from error
    return typing.cast(Machine, _decode(value, Machine, "machine"))


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _encode(getattr(value, field.name)) for field in _fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_encode(entry) for entry in value]
    return value


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)


def _decode(value: Any, wanted: Any, where: str) -> Any:
    """``value`` as the annotated type ``wanted``."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _first_that_fits(value, arguments, where)
    if origin is typing.Literal:
        return value if value in arguments else _refuse(value, wanted, where)
    if origin is tuple:
        if not isinstance(value, list):
            _refuse(value, wanted, where)
        return tuple(_decode(v, arguments[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            _refuse(value, wanted, where)
        return {
            _key(key, arguments[0], where): _decode(entry, arguments[1], f"{where}.{key}")
            for key, entry in value.items()
        }
    if dataclasses.is_dataclass(wanted):
        return _decode_object(value, wanted, where)
    return _decode_scalar(value, wanted, where)


def _decode_object(value: Any, wanted: Any, where: str) -> Any:
    if not isinstance(value, dict):
        _refuse(value, wanted, where)
    hints = typing.get_type_hints(wanted)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    parts = {key: _decode(entry, hints[key], f"{where}.{key}") for key, entry in value.items()}
    try:
        return wanted(**parts)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _decode_scalar(value: Any, wanted: Any, where: str) -> Any:
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        try:
            return wanted(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int in Python: true must not pass for 1
    return value if type(value) is wanted else _refuse(value, wanted, where)


def _first_that_fits(value: Any, arguments: tuple[Any, ...], where: str) -> Any:
    *others, last = [argument for argument in arguments if argument is not type(None)]
    for argument in others:
        try:
            return _decode(value, argument, where)
        except ConfigError:
            continue
    return _decode(value, last, where)


def _key(key: str, wanted: Any, where: str) -> Any:
    if wanted is not int:
        return key
    if not key.isdecimal():
        raise ConfigError(f"{where}: key {key!r} is no node id")
    return int(key)


def _refuse(value: Any, wanted: Any, where: str) -> typing.NoReturn:
    name = getattr(wanted, "__name__", str(wanted))
    raise ConfigError(f"{where}: {value!r} is not a {name}")
