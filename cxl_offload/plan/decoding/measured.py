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
    is that of the most rows, which prefills are then taken to reach too (they reach more).

    Parameters
    ----------
    operators
        Of the device ``cpu``.
    read_bytes_per_s
        What all CPUs read from the local node.
    """
    rows = max(point.rows for point in operators.linears)
    size = max(point.weight_bytes for point in operators.linears)
    products = 2 * rows * size / _BYTES / operators.linear_s(rows, size) / operators.threads
    one_row = size / operators.linear_s(1, size)
    made = replace(
        engine,
        products_flops_per_core=products,
        products_share=min(1.0, one_row / read_bytes_per_s),
        prefill_flops_per_core=products,
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
