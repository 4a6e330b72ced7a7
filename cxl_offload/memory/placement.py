"""Placement: what a rule became on the pages of one allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cxl_offload.units import format_bytes

NOT_FAULTED_IN = -1
"""The key under which bytes are counted that have no page yet (first touch, or swapped out)."""


def nodes_in_words(granted: Mapping[int, int]) -> list[str]:
    """``node 2: 4 MiB`` for each node of a placement, in their order."""
    return [
        f"{'not faulted in' if node == NOT_FAULTED_IN else f'node {node}'}: {format_bytes(nbytes)}"
        for node, nbytes in sorted(granted.items())
    ]


@dataclass(frozen=True, slots=True)
class Placement:
    """Requested against granted.

    Attributes
    ----------
    requested
        The rule in words; None for memory that is not this package's.
    granted
        Node id to bytes, asked from the pages at the time of the call. Empty for memory of a
        device, which is on no node.
    page_bytes
        Size of the pages that were asked for; transparent huge pages count as base pages.
    pinned
        Whether the memory is registered with the GPU driver by this package.
    simulated
        True when the pages are those of a simulated machine.
    devices
        Device-DAX device to bytes.
    notes
        Where the grant differs from the request, and why.
    """

    requested: str | None
    granted: Mapping[int, int]
    page_bytes: int
    pinned: bool
    simulated: bool
    notes: tuple[str, ...] = ()
    devices: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(self.granted.values()) + sum(self.devices.values())

    def __str__(self) -> str:
        parts = nodes_in_words(self.granted)
        parts += [f"{name}: {format_bytes(count)}" for name, count in sorted(self.devices.items())]
        granted = ", ".join(parts) or "nothing"
        kind = "simulated" if self.simulated else "real"
        return f"{self.requested or 'not of this session'} -> {granted} ({kind} pages)"
