"""Rates of an engine's CPU work from a profile of operators, in place of published or assumed ones.

Operators are timed in a stack of decoder layers (:mod:`cxl_offload.profile.operators`), so what is
between them is a rate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cxl_offload.plan.decoding.engine import EngineRates, RowCosts
from cxl_offload.profile.operators.model import (
    PIECE_CALLS,
    CacheTypePoint,
    OperatorProfile,
    Piece,
    PiecePoint,
)

_BYTES = 2
"""Of an element: operators are measured in half precision."""

_LINE = 3
"""Points that a line needs to be told from one that leaves out its last."""

_BETWEEN: tuple[Piece, ...] = ("norm", "rotary", "gate")
"""What calls of torch are made of."""


def measured_engine(
    engine: EngineRates,
    operators: OperatorProfile,
    *,
    read_bytes_per_s: float,
    cores: int,
    width: int,
    matrices: Sequence[tuple[int, int]] = (),
) -> EngineRates:
    """The engine with what was measured on this machine's CPUs, by as many threads as there.

    Attention in place and products of one row are shares of what the local node gives; arithmetic
    is a slope over the rows.

    Parameters
    ----------
    operators
        Of the device ``cpu``.
    read_bytes_per_s
        What all CPUs read from the local node.
    cores
        That the planner counts with: rates of one are such that all reach what the threads did.
    width
        Of a token, between the layers.
    matrices
        Bytes and number of the weights that a token is multiplied by.
    """
    found = _products(operators, matrices)
    one_row, arithmetic, most_rows = found or _linears(operators)
    made = replace(
        engine,
        products_flops_per_core=arithmetic / cores,
        products_share=min(1.0, one_row / read_bytes_per_s),
        prefill_flops_per_core=most_rows / cores,
        product_call_s=0.0 if found else operators.call_s(1, 1),
        call_s=operators.call_s(1, 1),
        python_instruction_s=operators.python_instruction_s(1, width),
    )
    caches = [point for point in operators.caches if point.operator == "attention in place"]
    if engine.products_flops_per_core and operators.pieces:
        made = _with_pieces(made, Pieces(operators.pieces), read_bytes_per_s, cores)
    elif not caches or engine.workspace_bytes_per_element:
        return made
    else:
        largest = max(point.cache_bytes for point in caches)
        reached = largest / operators.cache_s("attention in place", largest)
        made = _with_attention(made, reached, read_bytes_per_s, cores)
    return _with_cache_types(made, operators.cache_types, cores)


def _with_attention(
    engine: EngineRates, reached: float, read_bytes_per_s: float, cores: int
) -> EngineRates:
    """Attention that reads so many bytes a second."""
    return replace(
        engine,
        attention_share=min(1.0, reached / read_bytes_per_s),
        # One operation a byte where heads are not grouped, so at least as many.
        attention_flops_per_core=max(engine.attention_flops_per_core, reached / cores),
    )


def _with_cache_types(
    engine: EngineRates, points: Sequence[CacheTypePoint], cores: int
) -> EngineRates:
    """Arithmetic of attention where heads share keys, and what it reaches over other types."""
    if not points:
        return engine
    rates = {
        (point.kv_dtype, point.group): point.cache_bytes / point.seconds.median for point in points
    }
    return replace(
        engine,
        attention_flops_per_core=max(point.operations / point.seconds.median for point in points)
        / cores,
        kv_type_shares={
            name: rate / rates["", 1]
            for (name, group), rate in rates.items()
            if name and group == 1
        },
    )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a layer as lines: of a call and of rows."""

    points: tuple[PiecePoint, ...]

    @property
    def width(self) -> int:
        """Of the keys of a token."""
        return self._of("norm")[0].elements

    def _of(self, piece: Piece) -> list[PiecePoint]:
        return [point for point in self.points if point.piece == piece]

    def one_row_s(self, piece: Piece) -> float:
        """Seconds of the fewest rows."""
        return self._of(piece)[0].seconds.median

    def row_s(self, piece: Piece) -> float:
        """Seconds of one row more in a decode step."""
        few, *_, many = self._decoded(piece)
        return max(0.0, many.seconds.median - few.seconds.median) / (many.rows - few.rows)

    def element_s(self, piece: Piece) -> float:
        """The same, of one of its numbers."""
        return self.row_s(piece) / self._of(piece)[0].elements

    def prompt_element_s(self, piece: Piece) -> float:
        """Seconds of one number, of as many rows as were measured."""
        last = self._of(piece)[-1]
        return last.seconds.median / last.rows / last.elements

    def cache_line(self) -> tuple[float, float, float]:
        """Seconds of attention over no rows, of a row over no cache, and of a number in a cache."""
        short, long = self._of("short attention")[0], self._of("long attention")[0]
        rows = self.row_s("short attention"), self.row_s("long attention")
        if not rows[1]:  # measured while others had the CPUs
            last = self._of("long attention")[-1]
            rows = rows[0], last.seconds.median / last.rows
        slope = max(rows[1] - rows[0], rows[1] / 2) / (long.elements - short.elements)
        of_row = max(0.0, rows[0] - slope * short.elements)
        start = short.seconds.median - short.rows * (of_row + slope * short.elements)
        return max(0.0, start), of_row, slope

    def _decoded(self, piece: Piece) -> list[PiecePoint]:
        most = self._of("short attention")[-1].rows
        return [point for point in self._of(piece) if point.rows <= most]


def _with_pieces(
    engine: EngineRates, pieces: Pieces, read_bytes_per_s: float, cores: int
) -> EngineRates:
    """The engine with what lies between the products of transformers."""
    start, of_row, of_number = pieces.cache_line()
    calls = sum(pieces.one_row_s(piece) for piece in _BETWEEN)
    made = _with_attention(engine, _BYTES / of_number, read_bytes_per_s, cores)
    return replace(
        made,
        call_s=calls / PIECE_CALLS,
        attention_call_s=start,
        decode_rows=RowCosts(
            norm=pieces.element_s("norm"),
            rotary=pieces.element_s("rotary"),
            gate=pieces.element_s("gate"),
            logits=pieces.element_s("logits"),
            attention=of_row / pieces.width + pieces.element_s("store"),
        ),
        prompt_rows=RowCosts(
            norm=pieces.prompt_element_s("norm"),
            rotary=pieces.prompt_element_s("rotary"),
            gate=pieces.prompt_element_s("gate"),
            attention=pieces.prompt_element_s("prompt store"),
        ),
        prompt_attention_flops_per_core=1 / pieces.prompt_element_s("prompt attention") / cores,
    )


def _products(
    operators: OperatorProfile, matrices: Sequence[tuple[int, int]]
) -> tuple[float, float, float] | None:
    """Bytes/s of few rows, arithmetic/s of more and of most; None: not measured.

    Seconds of a pass over all matrices are taken as those of bytes and of arithmetic together, by
    the line over the rows that is wrong by the smallest part.
    """
    if not operators.products or not matrices:
        return None
    rows = sorted({point.rows for point in operators.products})
    seconds = {
        each: sum(count * operators.product_s(each, nbytes) for nbytes, count in matrices)
        for each in rows
    }
    start, slope = _relative_line(seconds)
    whole = sum(nbytes * count for nbytes, count in matrices)
    of_most = max(seconds[rows[-1]] - start, seconds[rows[-1]] / 2)
    operations = 2 * whole / _BYTES
    return whole / start, operations / slope, operations * rows[-1] / of_most


def _relative_line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Start and slope over rows with the least sum of squared shares of error; none below 0.

    The most rows are left out where there are others: prompts have a rate of their own.
    """
    rows = sorted(seconds)[: -1 if len(seconds) > _LINE else None]
    weighted = [(1 / seconds[each], each / seconds[each]) for each in rows]
    (start, slope), *_ = np.linalg.lstsq(np.array(weighted), np.ones(len(rows)), rcond=None)
    least = min(seconds.values()) / 2
    return max(float(start), least), max(float(slope), least / max(rows))


def _linears(operators: OperatorProfile) -> tuple[float, float, float]:
    """The same of FlexGen's linear layers, in float16, which were measured up to 64 rows."""
    rows = max(point.rows for point in operators.linears)
    size = max(point.weight_bytes for point in operators.linears)
    products = 2 * rows * size / _BYTES / operators.linear_s(rows, size)
    return size / operators.linear_s(1, size), products, products
