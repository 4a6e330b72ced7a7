"""Bytes, rates and times: parsed from text with a unit, printed with one, plain numbers between.

Inside the package every quantity is in bytes, bytes/s, nanoseconds or seconds and says so in its
name. Text without a unit is refused: "64" may be GB, GiB or pages, and guessing costs a run.
"""

from __future__ import annotations

import math
import numbers
import re
from decimal import Decimal
from typing import Any

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
NS = 1e-9
GB = 10**9

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": 1 << 40,
}
_MOST_BYTES = 1 << 63
_NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_LEAST_SECONDS = 1e-12
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")


def _split(text: str, units: dict[str, float], suffix: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match.group(2) if match else ""
    if suffix and unit.endswith(suffix):
        unit = unit[: -len(suffix)]
    elif suffix:
        unit = ""
    if match is None or unit not in units:
        known = ", ".join(name + suffix for name in units)
        raise ValueError(f"{text!r} is not a quantity like {example!r}; known units: {known}")
    value = float(match.group(1)) * units[unit]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite quantity")
    return value


def parse_bytes(text: str) -> int:
    """Bytes of a text such as ``"64 GiB"``; fractions of a byte are refused."""
    value = _split(text, {unit: float(size) for unit, size in _BYTES.items()}, "", "64 GiB")
    if value != int(value):
        raise ValueError(f"{text!r} is {value} bytes; a size is a whole number of bytes")
    if value >= _MOST_BYTES:
        raise ValueError(f"{text!r} is more than addresses of 64 bits reach")
    return int(value)


def whole_bytes(given: object) -> int:
    """Bytes of a size that is given as a number, or as a text such as ``"8GiB"``.

    Raises
    ------
    ValueError
        It is neither, or no size: negative, a fraction of a byte, more than can be addressed.
    """
    if isinstance(given, str):
        return parse_bytes(given)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ValueError(
            f"a {type(given).__name__} is no size; give a number of bytes, or a text like '64 GiB'"
        )
    size: Any = given  # numbers.Real says nothing of comparisons to type checkers
    if not 0 <= size < _MOST_BYTES:
        raise ValueError("a size is from 0 to what addresses of 64 bits reach")
    if size != int(size):
        raise ValueError("a size is a whole number of bytes")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a text such as ``"38.4 GB/s"`` or ``"109 GiB/s"``."""
    return _split(text, {unit: float(size) for unit, size in _BYTES.items()}, "/s", "38.4 GB/s")


def parse_latency_ns(text: str) -> float:
    """Nanoseconds of a text such as ``"139 ns"`` or ``"1.2 us"``."""
    return _split(text, _NANOSECONDS, "", "139 ns")


def format_number(value: float) -> str:
    """Four digits, thousands set off, never an exponent: ``"42,870"``, ``"0.00125"``."""
    return _plain(value, 4)


def _plain(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):,f}" if math.isfinite(value) else text


def format_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three significant digits: ``"31.5 GiB"``."""
    if abs(count) < KIB:
        return f"{count:.0f} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
    return f"{_plain(value / 1024, 3)} TiB" if abs(value) >= 1024 else f"{value:.4g} GiB"


def format_bandwidth(bytes_per_s: float) -> str:
    """``bytes_per_s`` in GB/s (10^9), the unit of data sheets: ``"38.4 GB/s"``."""
    return f"{_plain(bytes_per_s / GB, 3)} GB/s"


def format_seconds(seconds: float) -> str:
    """``seconds`` with the unit that leaves one to three digits before the point.

    What is below a thousandth of a nanosecond is nothing that takes time: ``"0 s"``.
    """
    if abs(seconds) < _LEAST_SECONDS:
        return "0 s"
    rounded = abs(float(f"{seconds:.3g}"))  # 999.9 us are 1 ms
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if rounded < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{_plain(seconds, 3)} s"


def counted(count: int, noun: str) -> str:
    """A number of things, such as ``"1 thread"`` or ``"4 threads"``."""
    return f"{count} {noun}" + "s" * (count != 1)
