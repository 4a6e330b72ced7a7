"""What weighted interleave over DRAM and CXL brings to a loop over an array.

Two tiers, cores that each keep some cache lines in flight, an access pattern and a working set.
Throughput is :func:`interleaved_bandwidth`, on the table that the hardware prefetchers
leave in force for the pattern, and after what the last-level cache keeps.

Source: Lebedev et al., Demystifying CXL Memory Bandwidth Expansion, 4.1, 6 and 7 (machine and
workloads), Tables 1 and 2 (rates and latencies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cxl_offload.core import LINE_BYTES
from cxl_offload.plan.equations.interleave import (
    bandwidth_bound,
    mean_latency_ns,
    shares_of_weights,
)
from cxl_offload.plan.training.zero_offload import PREFETCH_SPAN_BYTES
from cxl_offload.sim.machine import ReadOrWrite

Pattern = Literal["sequential", "strided", "indexed", "scatter"]

TIE = 1e-9
"""Relative gain below which a mix only ties with fewer CXL pages."""


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


@dataclass(frozen=True, slots=True)
class TierRates:
    """Saturated rates (software throughput) and idle latencies, [DRAM, CXL]."""

    bytes_per_s: tuple[float, float]
    latency_ns: tuple[float, float]


@dataclass(frozen=True, slots=True)
class MixedTiers:
    """One socket with the prefetchers on and off, and its last-level cache."""

    prefetch_on: TierRates
    prefetch_off: TierRates
    cache_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Loop:
    """Cores running over an array.

    ``lines_per_core`` are cache lines in flight for one hardware thread a core; ``smt`` threads a
    core keep ``smt`` times as many. ``working_set_bytes`` is the whole array, of all cores.
    """

    cores: float
    lines_per_core: float
    access: ReadOrWrite
    pattern: Pattern
    prefetch: bool
    working_set_bytes: float
    stride_bytes: int = 0
    smt: int = 1


def prefetchable(loop: Loop) -> bool:
    """Whether the hardware prefetchers help: they are on and the pattern is one they follow.

    Streams, and strides below 4 KiB. Accesses through an index and scattered writes are random
    to them, so the rates are those measured with the prefetchers off; the paper finds the best
    weights of a hash join independent of the setting (6.2).
    """
    if not loop.prefetch or loop.pattern in ("indexed", "scatter"):
        return False
    return loop.pattern == "sequential" or loop.stride_bytes < PREFETCH_SPAN_BYTES


def miss_fraction(loop: Loop, cache_bytes: float) -> float:
    """Share of the accesses that reach memory.

    Random accesses hit in proportion to what the cache holds; a stream over more than the cache
    holds never hits (least recently used), one over less always. Valid for a cache that all data
    may use: sub-NUMA clusters keep DRAM data out of the other clusters' slices and CXL data not
    (Sun et al., Demystifying CXL Memory, 4.3), which favours CXL for sets of a few cache sizes.
    """
    if loop.working_set_bytes <= cache_bytes:
        return 0.0
    if loop.pattern in ("indexed", "scatter"):
        return 1.0 - cache_bytes / loop.working_set_bytes
    return 1.0


def _traffic(loop: Loop) -> float:
    """Bytes that memory moves for a byte of the loop: a store reads its line, then writes it."""
    return 2.0 if loop.access == "write" else 1.0


def loop_bytes_per_s(tiers: MixedTiers, loop: Loop, weights: tuple[float, float]) -> float:
    """Bytes of cache lines the loop gets through a second, with pages spread by ``weights``.

    The bandwidth branch is charged the traffic (stores twice), the concurrency branch the lines
    that cores wait for (once: no core waits for a write-back). Infinite when all hits in cache.

    Valid for equal read:write costs on both tiers; a full-duplex link that favours CXL for mixed
    traffic, prefetchers that lose track in mixed regions and latencies above idle short of
    saturation are not in it.
    """
    rates = tiers.prefetch_on if prefetchable(loop) else tiers.prefetch_off
    misses = miss_fraction(loop, tiers.cache_bytes)
    if misses == 0:
        return float("inf")
    reached = interleaved_bandwidth(
        [rate / _traffic(loop) for rate in rates.bytes_per_s],
        shares_of_weights(weights),
        latency_ns=rates.latency_ns,
        lines_in_flight=loop.cores * loop.smt * loop.lines_per_core,
    )
    return reached / misses


def speedup(tiers: MixedTiers, loop: Loop, weights: tuple[float, float]) -> float:
    """Throughput with ``weights`` over DRAM-only; 1 when the cache holds everything."""
    dram_only = loop_bytes_per_s(tiers, loop, (1, 0))
    mixed = loop_bytes_per_s(tiers, loop, weights)
    if dram_only == float("inf"):
        return 1.0
    return mixed / dram_only


def best_mix(tiers: MixedTiers, loop: Loop, *, grid_total: int) -> tuple[int, int]:
    """Whole weights [DRAM, CXL] of sum ``grid_total`` with the highest throughput.

    From DRAM-only towards CXL-only; a further page on CXL must gain, a tie stays.
    """
    best = (grid_total, 0)
    highest = loop_bytes_per_s(tiers, loop, best)
    for cxl in range(1, grid_total + 1):
        weights = (grid_total - cxl, cxl)
        rate = loop_bytes_per_s(tiers, loop, weights)
        if rate > highest * (1 + TIE):
            best, highest = weights, rate
    return best


def gain_over_cxl(tiers: MixedTiers, loop: Loop, weights: tuple[float, float]) -> float:
    """Throughput gained over DRAM-only, as a fraction of what CXL alone gives.

    Source: Lebedev et al., 7.1 (1 would be the whole of the added bandwidth).
    """
    dram_only = loop_bytes_per_s(tiers, loop, (1, 0))
    if dram_only == float("inf"):
        return 0.0
    cxl_only = loop_bytes_per_s(tiers, loop, (0, 1))
    return (loop_bytes_per_s(tiers, loop, weights) - dram_only) / cxl_only


def smt_gain(tiers: MixedTiers, loop: Loop, *, grid_total: int) -> float:
    """Best throughput with two hardware threads a core over that with one, less 1.

    Two threads keep twice the lines in flight, which helps below saturation only.
    Source: Lebedev et al., 7.4.
    """
    one, two = replace(loop, smt=1), replace(loop, smt=2)
    single = loop_bytes_per_s(tiers, one, best_mix(tiers, one, grid_total=grid_total))
    double = loop_bytes_per_s(tiers, two, best_mix(tiers, two, grid_total=grid_total))
    if single == float("inf"):
        return 0.0
    return double / single - 1.0
