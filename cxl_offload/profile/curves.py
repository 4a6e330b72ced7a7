"""Single measurements: an estimate with its spread, and curves made of such."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cxl_offload.renamed import old_names
from cxl_offload.topology.node import Pages

LoopKind = Literal["load", "store", "nt_store", "copy"]
KINDS: tuple[LoopKind, ...] = ("load", "store", "nt_store", "copy")
"""``nt_store``: stores past the caches. Bytes are those of the program's own loads and stores: a
cached store makes the memory read its line as well, and a copy counts what is read and written."""


SATURATED = 0.95
"""A curve counts as saturated from here on: more threads gain at most 5 %."""


LEAST, MOST = 1e-15, 1e18
"""Of an estimate, in seconds, nanoseconds or bytes/s: beyond, quotients of two are no numbers."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with the 10th and 90th percentile of ``samples`` repeats (few: their extremes)."""

    median: float
    low: float
    high: float
    samples: int

    def __post_init__(self) -> None:
        values = (self.low, self.median, self.high)
        if not all(LEAST <= value <= MOST for value in values):
            raise ValueError(f"an estimate must be from {LEAST:g} to {MOST:g}, not {values}")
        if not self.low <= self.median <= self.high or self.samples < 1:
            raise ValueError(
                f"an estimate needs low <= median <= high of at least one sample, not {values} "
                f"of {self.samples}"
            )


def estimate(samples: Sequence[float]) -> Estimate:
    """Median and percentiles (nearest rank) of one or more samples."""
    if not samples:
        raise ValueError("an estimate needs at least one sample")
    ranked = sorted(samples)
    count = len(ranked)

    def at(share: float) -> float:
        return ranked[max(0, math.ceil(share * count) - 1)]

    median = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
    return Estimate(median=median, low=at(0.1), high=at(0.9), samples=count)


@dataclass(frozen=True, slots=True)
class Latency:
    """Idle latency of dependent loads in random order over ``working_set_bytes``.

    With base pages it includes the page-table walks that such an access pattern causes.
    """

    pages: Pages
    working_set_bytes: int
    latency_ns: Estimate


@dataclass(frozen=True, slots=True)
class BandwidthPoint:
    """Bandwidth of ``threads`` threads together."""

    threads: int
    bandwidth_bytes_per_s: Estimate

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"bandwidth of {self.threads} threads; at least 1")


def saturation_threads(points: Sequence[BandwidthPoint]) -> int:
    """The fewest threads whose median is within 5 % of the best median.

    Source: Wang et al., Performance Characterization of CXL Memory, III (threads beyond
    saturation add nothing); the 5 % are ours.
    """
    if not points:
        raise ValueError("a curve without points has no saturation")
    peak = max(point.bandwidth_bytes_per_s.median for point in points)
    return min(
        point.threads for point in points if point.bandwidth_bytes_per_s.median >= SATURATED * peak
    )


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """Bandwidth against threads, ascending, for one kind of access and of pages."""

    kind: LoopKind
    pages: Pages
    points: tuple[BandwidthPoint, ...]

    def __post_init__(self) -> None:
        threads = [point.threads for point in self.points]
        if not threads or threads != sorted(set(threads)):
            raise ValueError(f"a curve needs points with ascending threads, not {threads}")

    @property
    def peak_bytes_per_s(self) -> float:
        """The best median of the curve."""
        return max(point.bandwidth_bytes_per_s.median for point in self.points)

    @property
    def saturation_threads(self) -> int:
        """See :func:`saturation_threads`."""
        return saturation_threads(self.points)


@dataclass(frozen=True, slots=True)
class LoadedPoint:
    """Latency of one thread's dependent loads while others stream.

    ``delay_ns`` is the pause of each streaming thread after every 4 KiB; the bandwidth is that of
    all threads, the measured one included.
    """

    delay_ns: int
    latency_ns: Estimate
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LoadedCurve:
    """Loaded latency with ``threads`` streaming threads that load."""

    pages: Pages
    threads: int
    points: tuple[LoadedPoint, ...]


@dataclass(frozen=True, slots=True)
class MixPoint:
    """Bandwidth of ``reads`` lines read for every ``writes`` lines written past the caches.

    The stores are non-temporal, so that the ratio is also what the memory sees.
    """

    reads: int
    writes: int
    threads: int
    bandwidth_bytes_per_s: Estimate


@dataclass(frozen=True, slots=True)
class InterleavePoint:
    """Load bandwidth of memory whose 2 MiB granules go to nodes by ``weights``."""

    weights: Mapping[int, int]
    bandwidth_bytes_per_s: Estimate


@dataclass(frozen=True, slots=True)
class InterleaveSweep:
    """Weighted interleaves over one set of nodes, read by ``threads`` threads of one initiator."""

    initiator: int
    nodes: tuple[int, ...]
    threads: int
    pages: Pages
    points: tuple[InterleavePoint, ...]

    @property
    def best(self) -> InterleavePoint:
        """The weights with the highest median."""
        return max(self.points, key=lambda point: point.bandwidth_bytes_per_s.median)


__getattr__ = old_names(__name__)
