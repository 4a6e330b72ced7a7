"""Reads a file of published cases, with the line of every case for messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.files import read_text

_OPS = ("approx", "vector_approx", "range", "at_most", "at_least", "equals")
_TOLERANCES = ("rel", "abs", "factor")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is published: an operator, its operands and the tolerance."""

    op: str
    value: object = None
    low: float | None = None
    high: float | None = None
    tolerance: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One case: which public model answers it, with which inputs.

    ``wrong`` says why it cannot be answered; empty for a sound case. ``line`` counts from 1.
    ``source`` says where the number stands, ``description`` what it is. ``printed`` is the
    published number, or its lowest and highest, where ``expected`` asks for bounds only; nothing is
    scored by it.
    """

    id: str
    model: str
    inputs: Mapping[str, object]
    expected: Expectation | None
    use: str
    group: str
    file: str
    line: int
    wrong: str = ""
    source: str = ""
    description: str = ""
    printed: tuple[float, ...] = ()


def load_cases(path: str | Path) -> list[Case]:
    """The cases of a JSON file.

    Raises
    ------
    ConfigError
        The file cannot be read or is not a JSON array of objects; with file and line.
    """
    return parse_cases(read_text(path), file=str(path))


def parse_cases(text: str, *, file: str) -> list[Case]:
    """The cases of the text of such a file; ``file`` is for messages."""
    return [_case(entry, file, line) for entry, line in _entries(text, file)]


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {max(names, key=names.count)!r} stands twice in one object")
    return found


def _entries(text: str, file: str) -> list[tuple[object, int]]:
    """Items of the outermost array with the lines they start on."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant)
    position = _skip_space(text, 1 if text.startswith("\ufeff") else 0)
    if text[position : position + 1] != "[":
        raise ConfigError(
            "want a JSON array of cases", file=file, line=text.count("\n", 0, position) + 1
        )
    entries: list[tuple[object, int]] = []
    position = _skip_space(text, position + 1)
    if text[position : position + 1] == "]":
        return _end_of_file(text, position + 1, file, entries)
    while True:
        line = text.count("\n", 0, position) + 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ConfigError(error.msg, file=file, line=error.lineno) from error
        except RecursionError as error:
            raise ConfigError(
                "case from here on: nested too deeply", file=file, line=line
            ) from error
        except ValueError as error:
            raise ConfigError(f"case from here on: {error}", file=file, line=line) from error
        entries.append((entry, line))
        position = _skip_space(text, position)
        after = text[position : position + 1]
        if after == "]":
            return _end_of_file(text, position + 1, file, entries)
        if after != ",":
            line = text.count("\n", 0, position) + 1
            raise ConfigError("want , or ] after a case", file=file, line=line)
        position = _skip_space(text, position + 1)


def _end_of_file(
    text: str, position: int, file: str, entries: list[tuple[object, int]]
) -> list[tuple[object, int]]:
    position = _skip_space(text, position)
    if position != len(text):
        line = text.count("\n", 0, position) + 1
        raise ConfigError("text after the array of cases", file=file, line=line)
    return entries


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _case(entry: object, file: str, line: int) -> Case:
    """A case; what is wrong with it is kept, so that the others are still answered."""
    if not isinstance(entry, dict):
        raise ConfigError("a case is a JSON object", file=file, line=line)
    wrong = ""
    expected = None
    printed: tuple[float, ...] = ()
    try:
        expected = _expectation(entry.get("expected"), entry.get("tolerance_suggestion"))
        printed = _printed(entry.get("printed"))
        for name in ("id", "model"):
            if not isinstance(entry.get(name), str):
                raise ValueError(f"{name!r} is missing or no text")
        if not isinstance(entry.get("inputs"), dict):
            raise ValueError("'inputs' is missing or no object")
    except ValueError as error:
        wrong = str(error)
    inputs = entry.get("inputs")
    model = entry.get("model")
    return Case(
        id=str(entry.get("id", f"line {line}")),
        model=model if isinstance(model, str) else "",
        inputs=inputs if isinstance(inputs, dict) else {},
        expected=expected,
        use=str(entry.get("use", "unknown")),
        group=str(entry.get("group", model)),
        file=file,
        line=line,
        wrong=wrong,
        source=str(entry.get("source", "")),
        description=str(entry.get("description", "")),
        printed=printed,
    )


def _printed(value: object) -> tuple[float, ...]:
    if value is None:
        return ()
    numbers = value if isinstance(value, list) else [value]
    if not 1 <= len(numbers) <= 2:
        raise ValueError(f"'printed' is {value!r}, want a number, or the lowest and the highest")
    return tuple(_number("printed", number) for number in numbers)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, want a number")
    return value


def _expectation(expected: object, tolerance: object) -> Expectation:
    if not isinstance(expected, dict) or expected.get("op") not in _OPS:
        raise ValueError(f"'expected' needs an 'op' of {', '.join(_OPS)}")
    op = str(expected["op"])
    if tolerance is not None and not isinstance(tolerance, dict):
        raise ValueError(f"'tolerance_suggestion' is {tolerance!r}, want an object or null")
    allowed = {name: _number(f"tolerance {name}", v) for name, v in (tolerance or {}).items()}
    unknown = sorted(set(allowed) - set(_TOLERANCES))
    if unknown:
        raise ValueError(f"tolerance {unknown[0]!r} is none of {', '.join(_TOLERANCES)}")
    if op == "range":
        low, high = (_number(f"expected {name}", expected.get(name)) for name in ("min", "max"))
        return Expectation(op, low=low, high=high, tolerance=allowed)
    if "value" not in expected:
        raise ValueError(f"'expected' of {op} needs a 'value'")
    value = expected["value"]
    if op == "vector_approx":
        if not isinstance(value, list):
            raise ValueError(f"expected value is {value!r}, want a list of numbers")
        value = [_number("expected value", item) for item in value]
    elif op != "equals":
        value = _number("expected value", value)
    return Expectation(op, value=value, tolerance=allowed)
