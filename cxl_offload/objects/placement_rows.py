"""Rows of a report: bytes of every kind of tensor, requested against granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cxl_offload.memory.placement import nodes_in_words
from cxl_offload.objects.kind_store import KindUse, Part
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """Bytes of one part of one kind.

    Attributes
    ----------
    kind, part
        What for, and which part of a split (``host`` when it is not split).
    policy
        In words, as asked.
    requested_bytes
        At the moment there were most of them.
    granted
        Node to bytes at that moment, read from the pages.
    tiers
        The same by tier name; nodes outside every tier are left out.
    """

    kind: str
    part: str
    policy: str
    requested_bytes: int
    granted: dict[int, int]
    tiers: dict[str, int]

    def __str__(self) -> str:
        nodes = ", ".join(nodes_in_words(self.granted)) or "nothing"
        asked = f"{format_bytes(self.requested_bytes)} asked for, {self.policy}"
        return f"{self.kind} ({self.part}): {asked} -> {nodes}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind,
            "part": self.part,
            "policy": self.policy,
            "requested_bytes": self.requested_bytes,
            "granted_bytes_per_node": {str(node): count for node, count in self.granted.items()},
            "granted_bytes_per_tier": dict(self.tiers),
        }


def placement_rows(
    use: Mapping[tuple[str, str], KindUse],
    parts: Mapping[str, tuple[Part, ...]],
    machine: Machine,
) -> tuple[PlacementRow, ...]:
    """What a store counted, with the policy asked for and the machine's tiers beside it."""
    rows: list[PlacementRow] = []
    for (kind, name), bytes_held in use.items():
        policy = next(part.policy for part in parts[kind] if part.name == name)
        granted, tiers = dict(bytes_held.granted), machine.bytes_per_tier(bytes_held.granted)
        rows.append(PlacementRow(kind, name, str(policy), bytes_held.peak_bytes, granted, tiers))
    return tuple(rows)
