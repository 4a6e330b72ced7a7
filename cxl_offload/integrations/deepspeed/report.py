"""What an engine keeps where: kind, bytes, requested, granted, pinned, read from the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cxl_offload.memory.placement import nodes_in_words
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class KindRow:
    """One kind of host tensor, or the part of it that could not be placed.

    Attributes
    ----------
    kind
        Of ``kinds.KINDS``.
    tensors, nbytes
        How many there are, and their bytes.
    requested
        The policy; None for a part that DeepSpeed keeps where no policy reaches it.
    granted
        Node to bytes, asked from the pages; Device-DAX memory is on no node.
    pinned
        Whether all of it is registered with the GPU driver.
    simulated
        Whether the nodes are those of a simulated machine.
    notes
        Where the grant differs from the request, and why; what is not placed, and why.
    """

    kind: str
    tensors: int
    nbytes: int
    requested: str | None
    granted: dict[int, int]
    pinned: bool
    simulated: bool
    notes: tuple[str, ...] = ()

    def to_json(self, machine: Machine) -> dict[str, Any]:
        """Plain data, by the names that other reports have; a part that is not placed says so."""
        return {
            "kind": self.kind,
            "policy": self.requested or "not placed",
            "requested_bytes": self.nbytes,
            "granted_bytes_per_node": {str(node): n for node, n in self.granted.items()},
            "granted_bytes_per_tier": machine.bytes_per_tier(self.granted),
        }

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        granted = ", ".join(nodes_in_words(self.granted))
        if self.simulated and granted:
            granted += " (simulated)"
        requested = self.requested or "NOT PLACED"
        pinned = "yes" if self.pinned else "no"
        return (self.kind, format_bytes(self.nbytes), requested, granted or "-", pinned)


_HEAD = ("kind", "bytes", "requested", "granted", "pinned")


def table(rows: Sequence[KindRow], title: str, missed: Sequence[str]) -> str:
    """The rows as text, with notes and what could not be caught under them."""
    lines = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
    text = [title]
    for line in lines:
        text.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    text += [f"note: {row.kind}: {note}" for row in rows for note in row.notes]
    text += [f"not caught: {each}" for each in missed]
    return "\n".join(line.rstrip() for line in text)
