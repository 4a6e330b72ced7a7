"""Seconds of the operators that decoding is made of, as measured on one device; frozen data."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from cxl_offload.profile.curves import Estimate

OPERATORS_VERSION = 3
"""1 timed small calls and Python in loops of their own; 2 between the products of a layer; 3 times
products of few rows there too, over more weights than the caches hold."""

CacheOperator = Literal["copied attention", "attention in place", "load"]
"""What is done with keys and values: attention over transposed copies of them, as FlexGen computes
it on an accelerator; attention over them where they lie; a copy of them into fresh memory."""


Piece = Literal[
    "norm",
    "rotary",
    "gate",
    "logits",
    "store",
    "short attention",
    "long attention",
    "prompt store",
    "prompt attention",
]
"""What a decoder of transformers does between its products: norms and residuals, positions of
queries and keys, the gated activation, the choice of a token, storing a new row of the cache,
attention over short and long caches; storing the keys and values of a prompt, attention over it."""


PIECE_CALLS = 41
"""Calls of torch in the norms, rotary positions and gate of a layer; a test counts them."""


@dataclass(frozen=True, slots=True)
class LinearPoint:
    """``rows`` vectors times one matrix of ``weight_bytes`` that was not used for long.

    The mean of a square one and two of four to one, as a decoder has them.
    """

    rows: int
    weight_bytes: int
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class ProductPoint:
    """As :class:`LinearPoint`, by torch's own linear layer in bfloat16, as transformers has it."""

    rows: int
    weight_bytes: int
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class CachePoint:
    """One operator over ``cache_bytes`` of keys and values together."""

    operator: CacheOperator
    cache_bytes: int
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """What a layer of a decoder does between its products, timed in their sequence.

    Attributes
    ----------
    rows, hidden
        Vectors that the layer gets, and their width.
    call_s
        A call of torch that is neither product nor attention: norms, residuals, views, new rows of
        the cache; the mean over a layer's.
    python_instruction_s
        An instruction of the Python interpreter, among such as a framework's own code has.
    """

    rows: int
    hidden: int
    call_s: Estimate
    python_instruction_s: Estimate


@dataclass(frozen=True, slots=True)
class PiecePoint:
    """One piece of a layer in bfloat16, in its sequence.

    Attributes
    ----------
    rows
        Tokens that are computed together.
    elements
        Numbers that a row has there; of attention those of its cache, or operations over a prompt.
    """

    piece: Piece
    rows: int
    elements: int
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class CacheTypePoint:
    """Attention in place over keys and values that no cache of the processor holds.

    Attributes
    ----------
    kv_dtype
        What they are kept as, one of the planner's types; empty: bfloat16.
    group
        Heads of queries that share one of keys.
    cache_bytes
        Of keys and values together.
    operations
        Multiplications and additions of all heads of queries.
    """

    kv_dtype: str
    group: int
    cache_bytes: int
    operations: int
    seconds: Estimate


@dataclass(frozen=True, slots=True)
class AdamPoint:
    """One step of this package's Adam on states in single precision that no cache holds.

    ``traffic_bytes`` are those that it reads and writes.
    """

    parameters: int
    traffic_bytes: int
    seconds: Estimate

    @property
    def bytes_per_s(self) -> float:
        """What it draws from memory."""
        return self.traffic_bytes / self.seconds.median


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """Operators in half precision on one device.

    Attributes
    ----------
    device
        ``cpu``, or a GPU's name.
    threads
        Of torch on the CPU.
    linears
        For every number of rows the same sizes, ascending.
    caches
        For every operator, by size, ascending.
    layers
        For every width the same numbers of rows, ascending.
    products
        For every size the same numbers of rows, ascending; empty where they were not measured.
    pieces
        Every piece by rows, ascending; empty where they were not measured.
    cache_types
        Attention by what keys and values are kept as, and by groups of heads, bfloat16 without
        groups among them; empty where it was not measured.
    adam
        An optimizer's step; None where it was not measured.

    Raises
    ------
    ValueError
        Points are missing, twice, out of order or of nothing.
    """

    version: int = OPERATORS_VERSION
    device: str
    threads: int
    linears: tuple[LinearPoint, ...]
    caches: tuple[CachePoint, ...]
    layers: tuple[LayerPoint, ...]
    products: tuple[ProductPoint, ...] = ()
    pieces: tuple[PiecePoint, ...] = ()
    cache_types: tuple[CacheTypePoint, ...] = ()
    adam: AdamPoint | None = None

    def __post_init__(self) -> None:
        if not self.linears or not self.layers:
            missing = "layer" if self.linears else "linear layer"
            raise ValueError(f"operators of {self.device}: no {missing} was measured")
        wrong = _wrong_points(self)
        if wrong:
            raise ValueError(f"operators of {self.device}: {wrong}")

    def linear_s(self, rows: int, weight_bytes: float) -> float:
        """Seconds of a linear layer, between the measured sizes and numbers of rows.

        Between sizes seconds a byte are linear in the logarithm of the size, beyond them constant;
        between numbers of rows seconds are linear, beyond them too.
        """
        measured = sorted({point.rows for point in self.linears})
        at = [self._linear_at(each, weight_bytes) for each in measured]
        return _line(measured, at, rows)

    def product_s(self, rows: int, weight_bytes: float) -> float:
        """As :meth:`linear_s`, of products, for a number of rows that was measured."""
        points = [point for point in self.products if point.rows == rows]
        sizes = [point.weight_bytes for point in points]
        return _by_size(sizes, [point.seconds.median for point in points], weight_bytes)

    def cache_s(self, operator: CacheOperator, cache_bytes: float) -> float:
        """Seconds of an operator over so many bytes, as :meth:`linear_s` between sizes.

        Raises
        ------
        ValueError
            The operator was not measured.
        """
        points = [point for point in self.caches if point.operator == operator]
        if not points:
            raise ValueError(f"operators of {self.device}: {operator} was not measured")
        sizes = [point.cache_bytes for point in points]
        seconds = [point.seconds.median for point in points]
        return _by_size(sizes, seconds, cache_bytes)

    def call_s(self, rows: int, hidden: int) -> float:
        """Seconds of a call between products: linear in rows and in width, beyond them too."""
        return self._between(rows, hidden, lambda point: point.call_s.median)

    def python_instruction_s(self, rows: int, hidden: int) -> float:
        """Seconds of an instruction between products: as :meth:`call_s`, constant beyond them."""
        every = [(point.rows, point.hidden) for point in self.layers]
        rows, hidden = (
            min(max(value, min(measured)), max(measured))
            for value, measured in zip((rows, hidden), zip(*every, strict=True), strict=True)
        )
        return self._between(rows, hidden, lambda point: point.python_instruction_s.median)

    def _between(self, rows: int, hidden: int, of: Callable[[LayerPoint], float]) -> float:
        widths = sorted({point.hidden for point in self.layers})
        at = []
        for width in widths:
            points = [point for point in self.layers if point.hidden == width]
            at.append(
                _line([point.rows for point in points], [of(point) for point in points], rows)
            )
        # Narrower layers are made of calls that take as long, however few their elements.
        return _line(widths, at, max(hidden, widths[0]))

    def _linear_at(self, rows: int, weight_bytes: float) -> float:
        points = [point for point in self.linears if point.rows == rows]
        sizes = [point.weight_bytes for point in points]
        return _by_size(sizes, [point.seconds.median for point in points], weight_bytes)


def _wrong_points(operators: OperatorProfile) -> str:
    """What the points lack of what is read between them; empty where nothing is."""
    every = [point for name in _POINTS for point in getattr(operators, name)]
    values = [getattr(each, field.name) for each in every for field in fields(each)]
    if any(isinstance(value, int) and value < 1 for value in values):
        return "rows, sizes and operations are 1 or more"
    for name, outer, inner in _GRIDS:
        points = [(getattr(each, outer), getattr(each, inner)) for each in getattr(operators, name)]
        if not _is_grid(points):
            return f"{name} need every {inner} for every {outer}, once and ascending"
    for name, kind, size in (("caches", "operator", "cache_bytes"), ("pieces", "piece", "rows")):
        found = [(getattr(each, kind), getattr(each, size)) for each in getattr(operators, name)]
        if not all(map(_ascends, _by_first(found).values())):
            return f"{name} need every {size} of a {kind} once, ascending"
    return _wrong_pieces(operators.pieces) or _wrong_cache_types(operators.cache_types)


def _wrong_pieces(points: Sequence[PiecePoint]) -> str:
    found: dict[str, list[PiecePoint]] = {}
    for each in points:
        found.setdefault(each.piece, []).append(each)
    if not found:
        return ""
    missing = [name for name in get_args(Piece) if name not in found]
    if missing:
        return f"pieces lack {missing[0]}"
    short, long = found["short attention"], found["long attention"]
    if short[0].elements >= long[0].elements:
        return "pieces of long attention are over no larger cache than those of short attention"
    most = short[-1].rows
    for name, of_piece in found.items():
        if not name.startswith("prompt") and sum(each.rows <= most for each in of_piece) < 2:
            return f"pieces need {name} of two numbers of rows up to {most}"
    return ""


def _wrong_cache_types(points: Sequence[CacheTypePoint]) -> str:
    found = [(each.kv_dtype, each.group) for each in points]
    if len(set(found)) < len(found):
        return "cache_types need every type and group once"
    return "cache_types lack bfloat16 in groups of 1" if found and ("", 1) not in found else ""


_POINTS = ("linears", "caches", "layers", "products", "pieces", "cache_types")
_GRIDS = (
    ("linears", "rows", "weight_bytes"),
    ("layers", "hidden", "rows"),
    ("products", "weight_bytes", "rows"),
)


def _by_first(points: Sequence[tuple[Any, int]]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for first, second in points:
        found.setdefault(first, []).append(second)
    return found


def _ascends(values: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(values))


def _is_grid(points: Sequence[tuple[int, int]]) -> bool:
    """Whether for every first the seconds are the same, and for every second the firsts."""
    for each in (_by_first(points), _by_first([(second, first) for first, second in points])):
        rows = list(each.values())
        if not all(_ascends(row) and row == rows[0] for row in rows):
            return False
    return True


def _by_size(sizes: Sequence[int], seconds: Sequence[float], nbytes: float) -> float:
    if nbytes <= sizes[0]:
        return seconds[0] * nbytes / sizes[0] if len(sizes) == 1 else _small(sizes, seconds, nbytes)
    rates = [took / size for took, size in zip(seconds, sizes, strict=True)]
    if nbytes >= sizes[-1]:
        return rates[-1] * nbytes
    after = bisect_left(sizes, nbytes)
    low, high = math.log(sizes[after - 1]), math.log(sizes[after])
    share = (math.log(nbytes) - low) / (high - low)
    return nbytes * (rates[after - 1] * (1 - share) + rates[after] * share)


def _small(sizes: Sequence[int], seconds: Sequence[float], nbytes: float) -> float:
    """Below the smallest size: the line through the two smallest, never below 0 bytes' share."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return max(seconds[0] - slope * (sizes[0] - nbytes), seconds[0] * nbytes / sizes[0])


def _line(at: Sequence[int], values: Sequence[float], x: float) -> float:
    if len(at) == 1:
        return values[0]
    after = min(max(bisect_left(at, x), 1), len(at) - 1)
    share = (x - at[after - 1]) / (at[after] - at[after - 1])
    return values[after - 1] + (values[after] - values[after - 1]) * share
