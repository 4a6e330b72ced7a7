"""What the figures of the papers are made of: curves that are computed, points that are published.

Published numbers are read from the cases and the machine files of the package, nowhere else. A
curve is the public model of a case, asked with the inputs of that case but for the one that varies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cxl_offload.topology import Machine
from cxl_offload.validation import PUBLISHED_CASES, Case, load_cases, predict

Kind = Literal["predicted", "simulated"]
Tier = Literal["near", "remote", "far", "both"]
"""What a colour stands for: local DRAM, DRAM of the other socket, CXL, several of them."""

CLOSE = 0.1
"""Error up to which a prediction counts as close."""

Bound = Literal["", "at most", "at least"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: what is computed over what varies."""

    label: str
    kind: Kind
    tier: Tier
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A published number, and what the package says in its place.

    Attributes
    ----------
    what
        The quantity, for the tables.
    x
        Where it is drawn.
    low, high
        The published number; two where a range is published.
    predicted
        In the same unit; ``kind`` says how it was found.
    bound
        Whether the number is only a limit.
    tier
        What the prediction is of, for its colour.
    where
        Section, table or figure of the paper.
    held
        The case that holds the number, or the machine file and its fact.
    """

    what: str
    x: float
    low: float
    high: float
    predicted: float
    unit: str
    where: str
    held: str
    kind: Kind = "predicted"
    bound: Bound = ""
    tier: Tier = "both"

    @property
    def nearest(self) -> float:
        """The published number, or what is nearest to the prediction of what is published."""
        low = 0.0 if self.bound == "at most" else self.low
        high = float("inf") if self.bound == "at least" else self.high
        return min(max(self.predicted, low), high)

    @property
    def error(self) -> float:
        """Predicted over published, less 1; 0 within what is published."""
        if self.predicted == self.nearest:
            return 0.0
        return self.predicted / self.nearest - 1


@dataclass(frozen=True, slots=True)
class Given:
    """A published number that the curves start from: drawn, and not compared with anything."""

    x: float
    y: float
    held: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of parts, one after the other, each with its name and its length."""

    label: str
    kind: Kind
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. With ``rows`` every point is a row; with ``bars`` every bar."""

    title: str
    x_label: str
    y_label: str = ""
    curves: tuple[Curve, ...] = ()
    points: tuple[Point, ...] = ()
    given: tuple[Given, ...] = ()
    bars: tuple[Bar, ...] = ()
    rows: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper: the name on the command line, how it is cited, and its panels."""

    name: str
    cited: str
    title: str
    panels: Callable[[], tuple[Panel, ...]]

    def points(self) -> list[Point]:
        """All published numbers that its figure compares."""
        return [point for panel in self.panels() for point in panel.points]


@functools.lru_cache(maxsize=1)
def cases() -> Mapping[str, Case]:
    """The published cases by their ids, and those that ask the planner."""
    files = (PUBLISHED_CASES, PUBLISHED_CASES.with_name("plans.json"))
    return {case.id: case for file in files for case in load_cases(file)}


def asked(case: str, **changes: object) -> Any:
    """What the model of a case answers to its inputs, some of them changed."""
    found = cases()[case]
    return predict(found.model, {**found.inputs, **changes}).value


def _published(case: Case, item: int | None) -> tuple[float, float, Bound]:
    """Lowest and highest published number of a case, and whether it is a limit."""
    expected = case.expected
    if expected is None:
        raise ValueError(f"case {case.id}: {case.wrong}")
    if case.printed:
        return case.printed[0], case.printed[-1], ""
    if expected.op == "range":
        return float(expected.low or 0), float(expected.high or 0), ""
    value: Any = expected.value if item is None else expected.value[item]  # type: ignore[index]
    bounds: dict[str, Bound] = {"at_most": "at most", "at_least": "at least"}
    return float(value), float(value), bounds.get(expected.op, "")


def _section(source: str) -> str:
    """What stands behind the title of the paper."""
    return source.rpartition(", ")[2]


def point(
    case: str, what: str, x: float, *, unit: str = "", item: int | None = None, scale: float = 1.0
) -> Point:
    """The published number of a case, with the answer of its model; both times ``scale``."""
    found = cases()[case]
    low, high, bound = _published(found, item)
    answer = asked(case)
    predicted = answer if item is None else answer[item]
    return Point(
        what=what,
        x=x,
        low=low * scale,
        high=high * scale,
        predicted=predicted * scale,
        unit=unit,
        where=_section(found.source),
        held=f"case {case}",
        bound=bound,
    )


def swept(
    case: str,
    label: str,
    tier: Tier,
    xs: Iterable[float],
    change: Callable[[float], Mapping[str, object]],
    *,
    item: int | None = None,
    scale: float = 1.0,
) -> Curve:
    """The model of a case over ``xs``; ``change`` gives the inputs that differ at each of them."""
    at = tuple(xs)
    answers = [asked(case, **change(x)) for x in at]
    found = tuple((one if item is None else one[item]) * scale for one in answers)
    return Curve(label, "predicted", tier, at, found)


def fact(machine: Machine, name: str) -> tuple[float, str, str]:
    """A fact of a machine file: its value, where it is printed, and what holds it."""
    found = next(each for each in machine.facts if each.name == name)
    return found.value, found.source, f"{machine.name}: {name}"


def fact_point(
    machine: Machine,
    name: str,
    what: str,
    x: float,
    predicted: float,
    *,
    unit: str = "",
    scale: float = 1.0,
) -> Point:
    """A fact of a machine file, times ``scale``, beside what is predicted in its place."""
    value, where, held = fact(machine, name)
    return Point(what, x, value * scale, value * scale, predicted, unit, where, held)
