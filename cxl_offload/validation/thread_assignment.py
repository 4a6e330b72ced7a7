"""Threads over tiers so that their bandwidths add up to most, whatever is read.

Plans know what is read and divide by that (:mod:`cxl_offload.plan.equations.threads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from cxl_offload.plan.equations.threads import ThreadedTier
from cxl_offload.plan.exact import exact


def _steps(tier: ThreadedTier, total_threads: int) -> list[tuple[Fraction, int]]:
    """What further threads add, exactly: ``(bytes/s each, threads that add it)``, falling."""
    rate, peak = exact(tier.per_thread_bytes_per_s), exact(tier.peak_bytes_per_s)
    if rate == 0:
        return [(Fraction(0), total_threads)]
    whole = int(peak / rate)
    return [(rate, whole), (peak - whole * rate, 1), (Fraction(0), total_threads)]


def assign_threads(tiers: Sequence[ThreadedTier], total_threads: int) -> tuple[int, ...]:
    """Threads on each tier, ``total_threads`` in all, with the highest total bandwidth.

    The curves are concave, so serving the largest gains a thread first is optimal.
    Ties go to the earlier tier: threads that gain nothing sit on the fastest memory.

    Valid for independent tiers (no shared link) and threads that stream. Source: Wang et al.,
    Performance Characterization of CXL Memory, III (threads beyond saturation add nothing).

    Raises
    ------
    ValueError
        No tier, a negative thread count or a negative rate.
    """
    rates = [
        rate for tier in tiers for rate in (tier.per_thread_bytes_per_s, tier.peak_bytes_per_s)
    ]
    if not tiers or total_threads < 0 or min(rates) < 0:
        raise ValueError(
            f"{total_threads} threads over {len(tiers)} tiers: need >= 1 tier, numbers >= 0"
        )
    steps = [
        (gain, index, count)
        for index, tier in enumerate(tiers)
        for gain, count in _steps(tier, total_threads)
    ]
    threads = [0] * len(tiers)
    left = total_threads
    for _, index, count in sorted(steps, key=lambda step: (-step[0], step[1])):
        taken = min(count, left)
        threads[index] += taken
        left -= taken
    return tuple(threads)
