"""Rates of an engine's CPU work from a profile of operators, in place of published or assumed ones.

Operators are timed in a stack of decoder layers (:mod:`cxl_offload.profile.operators`), so what is
between them is not in these rates.
"""

from __future__ import annotations

from dataclasses import replace

from cxl_offload.plan.decoding.engine import EngineRates
from cxl_offload.profile.operators.model import OperatorProfile

_BYTES = 2
"""Of an element: operators are measured in half precision."""


def measured_engine(
    engine: EngineRates, operators: OperatorProfile, *, read_bytes_per_s: float
) -> EngineRates:
    """The engine with what was measured on this machine's CPUs.

    Attention in place and products of one row are shares of what the local node gives; arithmetic
    is that of the most rows that were measured.

    Parameters
    ----------
    operators
        Of the device ``cpu``.
    read_bytes_per_s
        What all CPUs read from the local node.
    """
    one_row, arithmetic, product_call_s = _products(operators) or _linears(operators)
    made = replace(
        engine,
        products_flops_per_core=arithmetic / operators.threads,
        products_share=min(1.0, one_row / read_bytes_per_s),
        prefill_flops_per_core=arithmetic / operators.threads,
        product_call_s=product_call_s,
        call_s=operators.call_s(1, 1),
        python_instruction_s=operators.python_instruction_s(1, 1),
    )
    caches = [point for point in operators.caches if point.operator == "attention in place"]
    if not caches or engine.workspace_bytes_per_element:
        return made
    largest = max(point.cache_bytes for point in caches)
    reached = largest / operators.cache_s("attention in place", largest)
    return replace(
        made,
        attention_share=min(1.0, reached / read_bytes_per_s),
        # One operation a byte where heads are not grouped, so at least as many.
        attention_flops_per_core=max(engine.attention_flops_per_core, reached / operators.threads),
    )


def _products(operators: OperatorProfile) -> tuple[float, float, float] | None:
    """Bytes/s of one row, arithmetic/s of more, seconds of a call, in bfloat16; None: not measured.

    Seconds are taken as those of a call, of bytes and of arithmetic together: by two sizes for the
    first and the second, by the least and the most rows for the third.
    """
    by_size: dict[int, dict[int, float]] = {}
    for point in operators.products:
        by_size.setdefault(point.weight_bytes, {})[point.rows] = point.seconds.median
    if not by_size:
        return None
    small, large = min(by_size), max(by_size)
    least, most = min(by_size[large]), max(by_size[large])
    one, all_rows = by_size[large][least], by_size[large][most]
    per_byte, call_s = one / large, 0.0
    if small < large:
        per_byte = max(per_byte / 2, (one - by_size[small][least]) / (large - small))
        call_s = max(0.0, by_size[small][least] - per_byte * small)
    per_row = max((all_rows - one) / (most - least), all_rows / most / 2)
    return 1 / per_byte, 2 * large / _BYTES / per_row, call_s


def _linears(operators: OperatorProfile) -> tuple[float, float, float]:
    """The same of FlexGen's linear layers, in float16, which were measured up to 64 rows."""
    rows = max(point.rows for point in operators.linears)
    size = max(point.weight_bytes for point in operators.linears)
    products = 2 * rows * size / _BYTES / operators.linear_s(rows, size)
    return size / operators.linear_s(1, size), products, operators.call_s(1, 1)
