"""How many threads read which tier: as many as saturate it, and where most time is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.exact import exact
from cxl_offload.renamed import old_names


@dataclass(frozen=True, slots=True)
class ThreadedTier:
    """A tier whose bandwidth grows linearly with its threads up to its peak."""

    node: str
    per_thread_bytes_per_s: float
    peak_bytes_per_s: float


def threaded_bandwidth(tier: ThreadedTier, threads: int) -> float:
    """Bytes/s of ``threads`` threads on ``tier``: linear, then flat."""
    return min(threads * tier.per_thread_bytes_per_s, tier.peak_bytes_per_s)


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
    take bandwidth from the others there (Wang et al., Performance Characterization of CXL Memory,
    III). Those that no tier can
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


__getattr__ = old_names(__name__)
