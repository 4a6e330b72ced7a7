"""One number of a machine file: a value with its unit, and where it comes from.

``{value: "292 ns", source: "II-B, Table I"}`` is printed there; ``derived: FORMULA`` says it
was computed from printed numbers; ``{value: ..., assumed: true, reason: ...}`` is a choice of
ours. ``bound: upper`` (``lower``) marks a limit rather than a measured value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from cxl_offload.files import Field, MappedFields
from cxl_offload.topology.cpulist import parse_cpulist
from cxl_offload.topology.model import MOST_CPUS, Citation
from cxl_offload.units import parse_bandwidth, parse_bytes, parse_latency_ns

SOURCE_KEYS = ("source", "derived", "assumed", "reason", "bound")
_COUNT = re.compile(r"([0-9]+) (?:threads|cores|lines|channels)")
_RATIO = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(%|x)")
_FLOPS = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([GT])FLOP/s")


def parse_count(text: str) -> int:
    """Whole number of a text such as ``"28 threads"``."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a count like '28 threads' (threads, cores, lines)")
    return int(match.group(1))


def parse_ratio(text: str) -> float:
    """Ratio of a text such as ``"46.4 %"`` or ``"2.1 x"``."""
    match = _RATIO.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a ratio like '46.4 %' or '2.1 x'")
    return float(match.group(1)) / (100 if match.group(2) == "%" else 1)


def parse_flops(text: str) -> float:
    """Operations per second of a text such as ``"125 TFLOP/s"``."""
    match = _FLOPS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a rate like '125 TFLOP/s'")
    return float(match.group(1)) * (1e9 if match.group(2) == "G" else 1e12)


def parse_seconds(text: str) -> float:
    """Seconds of a text such as ``"10 us"``."""
    return parse_latency_ns(text) * 1e-9


_FACT_PARSERS: dict[str, Callable[[str], float]] = {
    "_ns": parse_latency_ns,
    "_bytes_per_s": parse_bandwidth,
    "_bytes": parse_bytes,
    "_ratio": parse_ratio,
    "_count": parse_count,
}


def fact_parser(name: Field) -> Callable[[str], float]:
    """The parser that the suffix of a fact's name asks for; other suffixes are refused."""
    text = name.text()
    for suffix, parse in _FACT_PARSERS.items():
        if text.endswith(suffix):
            return parse
    name.fail(f"fact {text!r} must end in its unit: {', '.join(_FACT_PARSERS)}")


@dataclass(frozen=True, slots=True)
class Citations:
    """Reads quantities and keeps the source of each."""

    collected: list[Citation]

    def bytes(self, field: Field | None, what: str) -> int | None:
        """A size in bytes, more than 0."""
        return None if field is None else int(self._number(field, what, parse_bytes))

    def bandwidth(self, field: Field | None, what: str) -> float | None:
        """A bandwidth in bytes/s, more than 0."""
        return None if field is None else self._number(field, what, parse_bandwidth)

    def latency_ns(self, field: Field | None, what: str) -> float | None:
        """A latency in ns, more than 0."""
        return None if field is None else self._number(field, what, parse_latency_ns)

    def count(self, field: Field | None, what: str) -> int | None:
        """A count, more than 0."""
        return None if field is None else int(self._number(field, what, parse_count))

    def number(self, field: Field, what: str, parse: Callable[[str], float]) -> float:
        """Any quantity that ``parse`` understands, more than 0."""
        return self._number(field, what, parse)

    def cpus(self, field: Field | None, what: str) -> tuple[int, ...]:
        """A CPU list; no field, no CPUs."""
        if field is None:
            return ()
        parts = field.mapping(["value"], SOURCE_KEYS)
        text = parts["value"].text()
        try:
            cpus = parse_cpulist(text)
        except ValueError as error:
            parts["value"].fail(str(error))
        if cpus and cpus[-1] >= MOST_CPUS:
            parts["value"].fail(
                f"CPU {cpus[-1]} of {text}: {MOST_CPUS - 1} is the last of a kernel"
            )
        self.cite(field, parts, what, text)
        return cpus

    def fact(self, field: Field, what: str, parse: Callable[[str], float]) -> float:
        """An entry of ``facts``, which is a quantity with a name."""
        return self._number(field, what, parse, other_keys=("name", "when"))

    def _number(
        self,
        field: Field,
        what: str,
        parse: Callable[[str], float],
        *,
        other_keys: tuple[str, ...] = (),
    ) -> float:
        parts = field.mapping(["value"], (*SOURCE_KEYS, *other_keys))
        text = parts["value"].text()
        try:
            number = parse(text)
        except ValueError as error:
            parts["value"].fail(str(error))
        if number <= 0:
            parts["value"].fail(f"{text!r} must be more than 0; leave out what is not published")
        self.cite(field, parts, what, text)
        return number

    def cite(self, field: Field, parts: MappedFields, what: str, value: str) -> None:
        """Check the source keys of a quantity and keep its citation."""
        status, source, note = self._origin(field, parts)
        bound = None
        if "bound" in parts:
            bound = parts["bound"].text()
            if bound not in ("upper", "lower"):
                parts["bound"].fail(f"must be upper or lower, not {bound!r}")
        self.collected.append(
            Citation(what, value, status, source, note, cast('Literal["upper", "lower"]', bound))
        )

    def _origin(
        self, field: Field, parts: MappedFields
    ) -> tuple[Literal["printed", "derived", "assumed"], str, str]:
        if "assumed" in parts:
            if not parts["assumed"].boolean():
                parts["assumed"].fail("is either true or left out")
            if "source" in parts or "derived" in parts:
                field.fail("an assumed value has a reason, not a source or a derivation")
            if not parts.get("reason") or not parts["reason"].text().strip():
                field.fail("an assumed value needs a reason")
            return "assumed", "assumed", parts["reason"].text()
        if "reason" in parts:
            parts["reason"].fail("a reason goes with assumed: true")
        if "source" not in parts or not parts["source"].text().strip():
            field.fail("needs a source, or assumed: true with a reason")
        source = parts["source"].text()
        if "derived" in parts:
            return "derived", source, parts["derived"].text()
        return "printed", source, ""
