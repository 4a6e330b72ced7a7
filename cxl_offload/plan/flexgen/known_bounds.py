"""What bounds of some hardware say of hardware that is a little better.

A price plans again with one GiB or one GB/s more. Rates that are faster by at most a factor make
nothing faster than by that factor, and rooms that are larger by at most so many bytes are no better
than rooms that all are: so few batches of the better hardware need a bound of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cxl_offload.arrays import Floats
from cxl_offload.plan.better_hardware import gains_of
from cxl_offload.plan.flexgen.mode import Mode
from cxl_offload.plan.hardware import Hardware, HostNode

BoundOf = Callable[[Hardware, Mode], Floats]
"""Seconds that no block of 1, 2, 3, ... GPU batches undercuts; may have no entry."""

_ROUNDING = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class BetterBounds:
    """What known bounds say of better hardware; ``gains`` None: nothing."""

    known: KnownBounds
    gains: tuple[float, float] | None

    def may_be_below(self, mode: Mode, most: Floats) -> NDArray[np.intp]:
        """Indices of the numbers of batches whose bound may be below ``most``.

        Parameters
        ----------
        most
            float64 ``(B,)``: seconds of a block of 1 to B batches.
        """
        if self.gains is None:
            return np.arange(len(most))
        factor, more_bytes = self.gains
        known = self.known.with_room(more_bytes, mode)
        count = min(len(known), len(most))
        below = known[:count] * (_ROUNDING / factor) < most[:count]
        return np.flatnonzero(np.append(below, np.ones(len(most) - count, dtype=bool)))


@dataclass(frozen=True, slots=True)
class KnownBounds:
    """Bounds of hardware, worked out once for every enlargement of its rooms that is asked for."""

    hardware: Hardware
    bound_of: BoundOf
    _kept: dict[tuple[float, Mode], Floats] = field(default_factory=dict)

    def on(self, better: Hardware) -> BetterBounds:
        """What they say of hardware that is a little better."""
        return BetterBounds(self, gains_of(self.hardware, better))

    def with_room(self, more_bytes: float, mode: Mode) -> Floats:
        """The bounds where every room is so much larger."""
        key = (more_bytes, mode)
        if key not in self._kept:
            self._kept[key] = self.bound_of(_with_room(self.hardware, more_bytes), mode)
        return self._kept[key]


def _with_room(hardware: Hardware, more_bytes: float) -> Hardware:
    """Every room so much larger; a drive that is not there stays away."""
    if not more_bytes:
        return hardware

    def larger(node: HostNode) -> HostNode:
        return replace(node, usable_bytes=node.usable_bytes + more_bytes)

    drive = hardware.drive_usable_bytes
    return replace(
        hardware,
        nodes=tuple(larger(node) for node in hardware.nodes),
        gpu_usable_bytes=hardware.gpu_usable_bytes + more_bytes,
        drive_usable_bytes=drive + more_bytes if drive else 0.0,
    )
