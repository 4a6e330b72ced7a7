"""What a paper prints of vLLM's weight offload beside its speed: a share, a best size, a ratio."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.vllm.offload import (
    WeightOffload,
    copy_seconds_per_step,
    step_seconds,
    tokens_per_s,
)


def copy_fraction(case: WeightOffload, offload_bytes: float) -> float:
    """Share of a decode step spent in weight copies."""
    return copy_seconds_per_step(case, offload_bytes) / step_seconds(case, offload_bytes)


def best_offload_bytes(case: WeightOffload, grid_bytes: Sequence[float]) -> float:
    """The offload of the grid with the highest throughput; of equals, the smallest.

    Raises
    ------
    ValueError
        No entry of the grid leaves room for KV.
    """
    rates = {offload: tokens_per_s(case, offload) for offload in sorted(grid_bytes)}
    if not rates or max(rates.values()) <= 0:
        raise ValueError("best offload: no size of the grid leaves GPU memory for KV cache")
    return max(rates, key=lambda offload: rates[offload])


def mean_throughput_ratio(
    case: WeightOffload, other: WeightOffload, grid_bytes: Sequence[float]
) -> float:
    """Mean over the grid of the throughput of ``case`` over that of ``other``.

    Raises
    ------
    ValueError
        An empty grid, or a size at which ``other`` decodes nothing.
    """
    others = [tokens_per_s(other, offload) for offload in grid_bytes]
    if not others or min(others) <= 0:
        raise ValueError("throughput ratio: a size of the grid leaves no GPU memory for KV cache")
    rates = [tokens_per_s(case, offload) for offload in grid_bytes]
    return sum(rate / base for rate, base in zip(rates, others, strict=True)) / len(others)
