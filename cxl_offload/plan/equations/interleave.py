"""Bandwidth of memory whose pages are spread over tiers, and the shares that make it largest.

Shares are fractions of the pages (or of the bytes, the pages being equal), one a tier, and sum
to one. Accesses are taken to be spread like the pages: true for streams and for uniform random
access, not for a hot set that sits on one tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from cxl_offload.core import LINE_BYTES
from cxl_offload.plan.exact import exact


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

    Source: Wang et al., Hitchhiker's Guide to CXL Memory (Heimdall), 3.4 (1:1:0 on SPR-1: law
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


def concurrency_bound(
    latency_ns: Sequence[float], shares: Sequence[float], *, lines_in_flight: float
) -> float:
    """Bytes/s of ``lines_in_flight`` cache lines when nothing is saturated.

    Little's law: throughput is lines in flight over the mean latency. Valid while the latencies
    are the idle ones, that is below the knee of every tier's loaded-latency curve.
    """
    return lines_in_flight * LINE_BYTES * 1e9 / mean_latency_ns(latency_ns, shares)


def interleaved_bandwidth(
    bandwidth_bytes_per_s: Sequence[float],
    shares: Sequence[float],
    *,
    latency_ns: Sequence[float] | None = None,
    lines_in_flight: float | None = None,
) -> float:
    """Bytes/s of an interleaved region: the lower of the bandwidth and the concurrency bound.

    Without ``latency_ns`` and ``lines_in_flight`` the tiers are taken to be saturated. Both are
    asymptotic bounds of a closed queueing network; near the knee the truth lies below them, by
    about ``1/sqrt(lines_in_flight)``.

    Raises
    ------
    ValueError
        Only one of the two is given, or lists differ in length.
    """
    if (latency_ns is None) != (lines_in_flight is None):
        raise ValueError("latency_ns and lines_in_flight belong together: give both or neither")
    bound = bandwidth_bound(bandwidth_bytes_per_s, shares)
    if latency_ns is None or lines_in_flight is None:
        return bound
    return min(bound, concurrency_bound(latency_ns, shares, lines_in_flight=lines_in_flight))


def latency_factor(latency_ns: Sequence[float], shares: Sequence[float]) -> float:
    """Throughput against all pages on the first tier, lines in flight fixed, nothing saturated.

    ``L_0 / sum(f_i * L_i)``. Source: Little's law; Lebedev et al., Table 2 for latencies.
    """
    return latency_ns[0] / mean_latency_ns(latency_ns, shares)


def optimal_shares(bandwidth_bytes_per_s: Sequence[float]) -> tuple[float, ...]:
    """Shares that saturate every tier at once, ``B_i / sum(B)``; together they give ``sum(B)``.

    Valid where the bandwidth bound holds; with too few lines in flight the fastest tier alone is
    better (see ``interleaved_bandwidth``).
    """
    return shares_of_weights(bandwidth_bytes_per_s)


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


def ratio_change(from_weights: tuple[float, float], to_weights: tuple[float, float]) -> float:
    """How far a DRAM:CXL ratio moved: ``1 - (x2/y2) / (x1/y1)``; negative towards DRAM.

    Source: Lebedev et al., 6.3 (6:4 to 4:6 is 55 %).

    Raises
    ------
    ValueError
        The new ratio has no CXL or the old one no DRAM: the change is unbounded.
    """
    x1, y1 = from_weights
    x2, y2 = to_weights
    if x1 == 0 or y2 == 0:
        raise ValueError(
            f"ratio change {x1}:{y1} -> {x2}:{y2}: unbounded when the first has no DRAM or the "
            "second no CXL"
        )
    return 1.0 - (x2 * y1) / (y2 * x1)
