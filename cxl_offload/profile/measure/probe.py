"""Single measurements: one number each, with its spread. The only user of the C++ probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cxl_offload import _C
from cxl_offload.core import LINE_BYTES
from cxl_offload.errors import PlacementError
from cxl_offload.profile.model import (
    KINDS,
    BandwidthPoint,
    Estimate,
    LoadedPoint,
    LoopKind,
    Pages,
    estimate,
)
from cxl_offload.profile.other_work import OTHER_WORK
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes

MIXES = ((1, 0), (3, 1), (2, 1), (1, 1), (0, 1))
"""Lines read and lines written past the caches."""

_OF_KIND = {
    "load": (1, 0, False),
    "store": (0, 1, False),
    "nt_store": (0, 1, True),
    "copy": (1, 1, False),
}

_WARM_SHARE = 0.2
"""Share of each window for warming up: threads wake and caches fill with dirty lines."""


_UNDISTURBED = 0.95
"""The share of its window that a thread must have run for the window to count as clean."""


@dataclass(slots=True)
class Quality:
    """How many windows there were, and in how many other work was using the CPUs."""

    windows: int = 0
    disturbed: int = 0

    def note(self) -> str | None:
        """What to know about the numbers, if anything."""
        if not self.disturbed:
            return None
        return (
            f"{OTHER_WORK} in {self.disturbed} of {self.windows} windows; "
            "a number is from its clean windows or, without any, from the least disturbed one"
        )


class Buffer(Protocol):
    """Bytes that live as long as the object."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Allocator(Protocol):
    """Memory by node: what :class:`cxl_offload.memory.Session` offers and measuring needs."""

    @property
    def machine(self) -> Machine: ...
    @property
    def is_simulated(self) -> bool: ...
    def allocate(self, nbytes: int, policy: Mapping[int, int], *, pages: Pages = ...) -> Buffer: ...
    def bytes_per_node(self, address: int, nbytes: int) -> Mapping[int, int]: ...
    def trim(self) -> int: ...


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may run on."""
    return tuple(_C.allowed_cpus())


def best_isa() -> str:
    """The instruction set that is measured with."""
    return str(_C.supported_isas()[-1])


def kinds() -> tuple[LoopKind, ...]:
    """Kinds of access that this processor's build has."""
    return tuple(kind for kind in KINDS if kind != "nt_store" or _C.has_non_temporal_stores())


def mixes() -> tuple[tuple[int, int], ...]:
    """Mixes that can be measured: those that write need non-temporal stores."""
    return tuple(mix for mix in MIXES if mix[1] == 0 or _C.has_non_temporal_stores())


def prepare(
    allocator: Allocator,
    nbytes: int,
    weights: Mapping[int, int],
    *,
    pages: Pages,
    cpus: Sequence[int],
) -> Buffer:
    """A buffer on the nodes of ``weights``, its pages asked, filled with random words.

    Raises
    ------
    PlacementError
        If pages are on other nodes than asked for: their numbers would carry the wrong name.
    """
    buffer = allocator.allocate(nbytes, weights, pages=pages)
    granted = {
        node: count
        for node, count in allocator.bytes_per_node(buffer.address, buffer.nbytes).items()
        if count > 0
    }
    if set(granted) != set(weights):
        raise PlacementError(
            f"measure nodes {sorted(weights)}: the {format_bytes(nbytes)} to measure with are on "
            f"nodes {sorted(granted)}; free memory on the nodes asked for"
        )
    _C.fill_random(buffer.address, buffer.nbytes, list(cpus))
    return buffer


def prepare_chase(
    allocator: Allocator, nbytes: int, node: int, *, pages: Pages, cpus: Sequence[int]
) -> Buffer:
    """As :func:`prepare` on one node, all lines linked into one random cycle."""
    buffer = prepare(allocator, nbytes, {node: 1}, pages=pages, cpus=cpus)
    _C.link_cycle(buffer.address, buffer.nbytes)
    return buffer


def _bandwidth(
    buffer: Buffer,
    mix: tuple[int, int, bool],
    cpus: Sequence[int],
    *,
    seconds: float,
    repeats: int,
    quality: Quality,
) -> Estimate:
    reads, writes, non_temporal = mix
    traffic = _C.Traffic(reads=reads, writes=writes, non_temporal=non_temporal)
    window = seconds / repeats
    clean: list[float] = []
    disturbed: list[tuple[float, float]] = []
    for _ in range(repeats):
        done = _C.run_traffic(
            buffer.address,
            buffer.nbytes,
            traffic,
            list(cpus),
            warmup_s=window * _WARM_SHARE,
            seconds=window * (1 - _WARM_SHARE),
        )
        ran = min(part.cpu_seconds / part.seconds for part in done)
        if ran >= _UNDISTURBED:
            clean.append(_rate(done))
        else:
            disturbed.append((ran, _rate(done)))
    quality.windows += repeats
    quality.disturbed += len(disturbed)
    return estimate(clean or [max(disturbed)[1]])


def _rate(done: Sequence[_C.ThreadTraffic]) -> float:
    """Bytes/s of all threads; their windows differ by one burst at most."""
    return float(sum((part.bytes_read + part.bytes_written) / part.seconds for part in done))


def kind_bandwidth(
    buffer: Buffer,
    kind: LoopKind,
    cpus: Sequence[int],
    *,
    seconds: float,
    repeats: int,
    quality: Quality,
) -> BandwidthPoint:
    """Bandwidth of one thread on each of ``cpus``."""
    rate = _bandwidth(
        buffer, _OF_KIND[kind], cpus, seconds=seconds, repeats=repeats, quality=quality
    )
    return BandwidthPoint(threads=len(cpus), bandwidth_bytes_per_s=rate)


def mix_bandwidth(
    buffer: Buffer,
    reads: int,
    writes: int,
    cpus: Sequence[int],
    *,
    seconds: float,
    repeats: int,
    quality: Quality,
) -> Estimate:
    """Bandwidth of ``reads`` lines read for every ``writes`` lines written past the caches."""
    mix = (reads, writes, writes > 0)
    return _bandwidth(buffer, mix, cpus, seconds=seconds, repeats=repeats, quality=quality)


def idle_latency(linked: Buffer, cpu: int, *, seconds: float) -> Estimate:
    """ns of one dependent load; a sample is the mean of 1024 of them."""
    return estimate(
        _C.idle_latency(
            linked.address,
            linked.nbytes,
            cpu,
            warmup_s=seconds * _WARM_SHARE,
            seconds=seconds * (1 - _WARM_SHARE),
        )
    )


def loaded_latency(
    linked: Buffer, buffer: Buffer, cpus: Sequence[int], *, delay_ns: int, seconds: float
) -> LoadedPoint:
    """Latency on the first of ``cpus`` while the others load with pauses of ``delay_ns``."""
    samples, done = _C.loaded_latency(
        linked.address,
        linked.nbytes,
        cpus[0],
        buffer.address,
        buffer.nbytes,
        _C.Traffic(reads=1, writes=0, delay_ns=delay_ns),
        list(cpus[1:]),
        warmup_s=seconds * _WARM_SHARE,
        seconds=seconds * (1 - _WARM_SHARE),
    )
    latency = estimate(samples)
    own = LINE_BYTES / (latency.median * 1e-9)
    return LoadedPoint(
        delay_ns=delay_ns, latency_ns=latency, bandwidth_bytes_per_s=_rate(done) + own
    )
