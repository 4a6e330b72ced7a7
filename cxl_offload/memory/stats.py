"""What a session holds: bytes per node and tier, and what its pools do with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cxl_offload.topology import Tier


@dataclass(frozen=True, slots=True)
class Count:
    """One quantity now, at its highest, and summed over all time."""

    current: int
    peak: int
    total: int


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Bytes that a session holds on a node, tier or device, cached blocks included.

    ``peak_bytes`` of a tier is the sum of its nodes' peaks, an upper bound: the nodes need not
    have peaked together. ``capacity_bytes`` is a limit set by the user, None without one.
    """

    current_bytes: int
    peak_bytes: int
    total_bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a session.

    Attributes
    ----------
    nodes, tiers
        Bytes held, by node id and by tier name. Pages of first touch are not in them: nobody
        knows their node before they are touched.
    devices
        Bytes held of Device-DAX devices that the session has claimed, by device name.
    asked_bytes, allocations
        What callers asked for: bytes, and number of live allocations.
    held_bytes
        The same, rounded up to the blocks that serve it.
    mapped_bytes
        All bytes mapped, live or cached.
    cached_bytes
        Bytes mapped but free for the next allocation; ``trim()`` returns them.
    """

    nodes: Mapping[int, NodeUse]
    tiers: Mapping[str, NodeUse]
    devices: Mapping[str, NodeUse]
    asked_bytes: Count
    allocations: Count
    held_bytes: Count
    mapped_bytes: Count
    cached_bytes: Count


def tier_use(tiers: Iterable[Tier], nodes: Mapping[int, NodeUse]) -> dict[str, NodeUse]:
    """Sums the use of nodes over the tiers that they belong to."""
    result = {}
    for tier in tiers:
        members = [nodes[node] for node in tier.nodes if node in nodes]
        limits = [use.capacity_bytes for use in members if use.capacity_bytes is not None]
        result[tier.name] = NodeUse(
            current_bytes=sum(use.current_bytes for use in members),
            peak_bytes=sum(use.peak_bytes for use in members),
            total_bytes=sum(use.total_bytes for use in members),
            capacity_bytes=sum(limits) if limits and len(limits) == len(tier.nodes) else None,
        )
    return result
