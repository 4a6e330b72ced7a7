"""How many threads work on which tier, so that their bandwidths add up to most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from cxl_offload.plan.exact import exact


@dataclass(frozen=True, slots=True)
class ThreadedTier:
    """A tier whose bandwidth grows linearly with its threads up to its peak."""

    node: str
    per_thread_bytes_per_s: float
    peak_bytes_per_s: float


def threaded_bandwidth(tier: ThreadedTier, threads: int) -> float:
    """Bytes/s of ``threads`` threads on ``tier``: linear, then flat."""
    return min(threads * tier.per_thread_bytes_per_s, tier.peak_bytes_per_s)


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


def saturating_threads(tier: ThreadedTier) -> int:
    """The fewest threads that reach the peak, at least 1."""
    if tier.per_thread_bytes_per_s <= 0:
        return 1
    peak, rate = exact(tier.peak_bytes_per_s), exact(tier.per_thread_bytes_per_s)
    return max(1, math.ceil(peak / rate))


def threads_for_bytes(
    tiers: Sequence[ThreadedTier], nbytes: Sequence[float], total_threads: int
) -> tuple[int, ...]:
    """Threads on each tier with which the last of them has read its bytes soonest.

    One thread after the other goes where most time is left, but never beyond saturation: it would
    take bandwidth from the others there (source as :func:`assign_threads`). Those that no tier can
    use sit on the first one that is read. A tier without bytes has none; with fewer threads than
    tiers that are read, those with most time have one.

    Raises
    ------
    ValueError
        Another number of bytes than of tiers, or no thread.
    """
    if len(tiers) != len(nbytes) or total_threads < 1:
        raise ValueError(
            f"{total_threads} threads, bytes of {len(nbytes)} for {len(tiers)} tiers: need at "
            "least 1 thread, and as many bytes as tiers"
        )
    read = [at for at, count in enumerate(nbytes) if count > 0]
    most = {at: saturating_threads(tiers[at]) for at in read}
    threads = [0] * len(tiers)

    def left_s(at: int) -> float:
        rate = threaded_bandwidth(tiers[at], threads[at])
        return nbytes[at] / rate if rate else math.inf

    for _ in range(total_threads if read else 0):
        hungry = [at for at in read if threads[at] < most[at]] or read[:1]
        threads[max(hungry, key=lambda at: (left_s(at), nbytes[at], -at))] += 1
    return tuple(threads)
