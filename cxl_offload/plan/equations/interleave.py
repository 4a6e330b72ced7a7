"""Bandwidth of memory whose pages are spread over tiers, and the shares that make it largest.

Shares are fractions of the pages (or of the bytes, the pages being equal), one a tier, and sum
to one. Accesses are taken to be spread like the pages: true for streams and for uniform random
access, not for a few busy bytes that sit on one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from cxl_offload.plan.exact import exact
from cxl_offload.renamed import old_names


def shares_of_weights(weights: Sequence[float]) -> tuple[float, ...]:
    """Shares of ``weights``; a weight of 0 leaves its tier unused.

    Raises
    ------
    ValueError
        No weights, a negative one, or all of them 0.
    """
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"weights {list(weights)}: need numbers >= 0, at least one above 0")
    total = sum(weights)
    return tuple(weight / total for weight in weights)


def _same_length(what: str, first: Sequence[float], second: Sequence[float]) -> None:
    if len(first) != len(second):
        raise ValueError(f"{what}: {len(first)} and {len(second)} entries; one a tier in both")


def bandwidth_bound(bandwidth_bytes_per_s: Sequence[float], shares: Sequence[float]) -> float:
    """Bytes/s when some tier is saturated: ``min(B_i / f_i)`` over the used tiers.

    Every byte moved takes ``f_i`` bytes from tier i, so tier i alone allows ``B_i / f_i``.

    Valid for streams with enough requests in flight on every tier. ``bandwidth_bytes_per_s`` is
    the saturated rate of a tier for the accessing cores and the access at hand (reads, writes).

    Source: Wang et al., Hitchhiker's Guide to CXL Memory (Heimdall), 3.4 (1:1:0 on SPR-1: bound
    122 GiB/s, measured 123.6); Lebedev et al., Demystifying CXL Memory Bandwidth Expansion, 6.1.
    """
    _same_length("bandwidths and shares", bandwidth_bytes_per_s, shares)
    return min(
        rate / share for rate, share in zip(bandwidth_bytes_per_s, shares, strict=True) if share > 0
    )


def mean_latency_ns(latency_ns: Sequence[float], shares: Sequence[float]) -> float:
    """Mean idle latency over the pages: ``sum(f_i * L_i)``."""
    _same_length("latencies and shares", latency_ns, shares)
    return sum(latency * share for latency, share in zip(latency_ns, shares, strict=True))


def best_weights(bandwidth_bytes_per_s: Sequence[float], *, total: int) -> tuple[int, ...]:
    """Whole weights >= 0 summing to ``total`` whose bandwidth bound is highest.

    Maximising ``min(B_i / w_i)`` is minimising ``max(w_i / B_i)``. Adding one unit at a time to
    the tier that stays least loaded reaches the minimum; among all weights that reach it, the
    ones with most on the earlier (faster) tiers are returned, so that a slower tier is used only
    where it gains. Exact: rates are compared as the decimals they were written as.

    Raises
    ------
    ValueError
        ``total`` below 1, no tier, or no tier with a bandwidth above 0.
    """
    rates = [exact(rate) for rate in bandwidth_bytes_per_s]
    if total < 1 or not rates or min(rates) < 0 or max(rates) == 0:
        raise ValueError(
            f"best weights of total {total} over {list(bandwidth_bytes_per_s)}: need a total >= 1 "
            "and bandwidths >= 0 with one above 0"
        )
    used = [index for index, rate in enumerate(rates) if rate > 0]
    # No tier gets less than its quota rounded down, so the walk starts there (Jefferson's method).
    greedy = [int(total * rate / sum(rates)) for rate in rates]
    for _ in range(total - sum(greedy)):
        least = min(used, key=lambda index: (Fraction(greedy[index] + 1) / rates[index], index))
        greedy[least] += 1
    load = max(Fraction(greedy[index]) / rates[index] for index in used)
    weights = []
    left = total
    for rate in rates:
        weight = min(left, int(load * rate))
        weights.append(weight)
        left -= weight
    return tuple(weights)


__getattr__ = old_names(__name__)
