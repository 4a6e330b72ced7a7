"""How thoroughly to measure, and over how much memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.profile.model import KINDS, LoopKind, MeasureMode
from cxl_offload.renamed import old_names
from cxl_offload.topology import Node
from cxl_offload.units import GIB, MIB, format_bytes

PathPart = Literal["latency", "bandwidth", "loaded", "mixes", "pages", "copies"]
"""What there is to measure on a path in the order of importance, and between GPUs and nodes."""

_ALL_PARTS: tuple[PathPart, ...] = ("latency", "bandwidth", "loaded", "mixes", "pages", "copies")

_LEAST_BYTES = 4 * MIB
ASSUMED_CACHE_BYTES = 64 * MIB
"""Of the last level, where the machine does not say."""

_BYTES_PER_THREAD = 16 * MIB


@dataclass(frozen=True, slots=True)
class Effort:
    """What a mode measures.

    Attributes
    ----------
    delays_ns
        Pauses after every 4 KiB of the streaming threads of the loaded-latency curve.
    cache_multiple
        Working set in last-level caches. A cache that replaced the oldest line would never hit
        in a sweep larger than itself; real ones keep some, fewer the larger the sweep.
    longest_s
        The most for one number, all repeats of it.
    copy_bytes
        Of the large copies between a GPU and a node.
    parts, kinds
        What is measured at all, and with which kinds of access.
    """

    mode: MeasureMode
    repeats: int
    few_threads: bool
    delays_ns: tuple[int, ...]
    cache_multiple: int
    largest_bytes: int
    longest_s: float
    copy_bytes: int
    parts: tuple[PathPart, ...] = _ALL_PARTS
    kinds: tuple[LoopKind, ...] = KINDS


QUICK = Effort(
    mode="quick",
    repeats=3,
    few_threads=True,
    delays_ns=(10_000, 1_000, 200, 0),
    cache_multiple=4,
    largest_bytes=GIB,
    longest_s=0.4,
    copy_bytes=64 * MIB,
)
RATES = replace(
    QUICK,
    mode="rates",
    longest_s=0.3,
    parts=("latency", "bandwidth"),
    kinds=("load", "store"),
)
FULL = Effort(
    mode="full",
    repeats=5,
    few_threads=False,
    delays_ns=(20_000, 10_000, 5_000, 2_000, 1_000, 700, 500, 300, 200, 100, 50, 0),
    cache_multiple=8,
    largest_bytes=4 * GIB,
    longest_s=1.0,
    copy_bytes=256 * MIB,
)


@dataclass(frozen=True, slots=True)
class WorkingSets:
    """Bytes of the buffer that threads stream over, and of the one that is chased through."""

    traffic_bytes: int
    chase_bytes: int
    notes: tuple[str, ...] = ()


def choose_sizes(
    initiator: Node, node: Node, *, threads: int, effort: Effort, asked_bytes: int | None = None
) -> WorkingSets:
    """Working sets far beyond the caches, within a quarter of the node's free memory each.

    Parameters
    ----------
    asked_bytes
        The user's own choice instead, kept whatever the caches.

    Raises
    ------
    ValueError
        The node has no room for anything worth measuring, or less is asked for.
    """
    notes = []
    if asked_bytes is not None:
        wanted = asked_bytes
    else:
        if initiator.llc_bytes is None:
            notes.append(
                f"the last-level cache of node {initiator.id} is not known; "
                f"{format_bytes(ASSUMED_CACHE_BYTES)} assumed"
            )
        cache = initiator.llc_bytes or ASSUMED_CACHE_BYTES
        wanted = max(effort.cache_multiple * cache, threads * _BYTES_PER_THREAD)
        wanted = min(wanted, effort.largest_bytes)
    free = node.capacity_bytes if node.free_bytes is None else node.free_bytes
    granted = min(wanted, free // 4) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if granted < _LEAST_BYTES:
        raise ValueError(
            f"measure node {node.id}: {format_bytes(granted)} to measure with "
            f"({format_bytes(free)} free, {format_bytes(wanted)} wanted); "
            f"at least {format_bytes(_LEAST_BYTES)} are needed"
        )
    if initiator.llc_bytes is not None and granted < 2 * initiator.llc_bytes:
        notes.append(
            f"the working set of {format_bytes(granted)} is less than twice the last-level cache "
            f"({format_bytes(initiator.llc_bytes)}); the numbers include cache hits"
        )
    return WorkingSets(granted, min(granted, GIB), tuple(notes))


__getattr__ = old_names(__name__)
