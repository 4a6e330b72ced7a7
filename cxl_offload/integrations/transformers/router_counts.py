"""Which experts forward passes ask for, counted where the routers compute.

On an accelerator the counts stay there until a pass is over; then a copy to the host is queued, and
read when it has arrived, a pass or more later. So no layer waits for its router.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray


class RouterCounts:
    """Counts how many passes asked for each expert.

    A pass reads an expert once, however many of its tokens ask for it; so that is what counts.

    Parameters
    ----------
    experts
        Name of a layer to its number of experts, in the order of the counts.
    """

    def __init__(self, experts: Mapping[str, int]) -> None:
        self._slots: dict[str, tuple[int, int]] = {}
        self._total = 0
        for name, count in experts.items():
            self._slots[name] = (self._total, count)
            self._total += count
        self._lanes: dict[torch.device, _Lane] = {}

    def note(self, name: str, asked: torch.Tensor) -> None:
        """The tokens of a layer ask for these experts.

        Parameters
        ----------
        asked
            Integers of any shape, on the device of the router; those below 0 and beyond the
            layer's experts are of other ranks.
        """
        if asked.device not in self._lanes:
            self._lanes[asked.device] = _Lane(self._total, asked.device)
        self._lanes[asked.device].note(*self._slots[name], asked)

    def pass_ends(self) -> NDArray[np.float64] | None:
        """What has been asked for and not been told yet: float64 ``(experts,)``.

        None where the copies from accelerators have not arrived; their counts come later.
        """
        arrived = [lane.take() for lane in self._lanes.values()]
        known = [one for one in arrived if one is not None]
        return np.sum(known, axis=0) if known else None


class _Lane:
    """The counts of the routers of one device."""

    def __init__(self, total: int, device: torch.device) -> None:
        self._pass = torch.zeros(total + 1, dtype=torch.float64, device=device)  # the last: others
        self._passes = torch.zeros_like(self._pass)
        self._event: torch.Event | None = None
        self._host = self._passes
        if device.type != "cpu":
            self._host = torch.zeros(total + 1, dtype=torch.float64, pin_memory=True)
            self._event = torch.Event(device)
        self._under_way = False

    def note(self, first: int, count: int, asked: torch.Tensor) -> None:
        mine = (asked >= 0) & (asked < count)
        slots = torch.where(mine, asked + first, self._pass.numel() - 1)
        self._pass.index_fill_(0, slots.flatten(), 1.0)

    def take(self) -> NDArray[np.float64] | None:
        """The counts that have arrived; queues the copy of those that have not."""
        self._passes += self._pass
        self._pass.zero_()
        if self._event is None:
            return self._told()
        told = None
        if self._under_way and self._event.query():
            told, self._under_way = self._told(), False
        if not self._under_way:
            self._host.copy_(self._passes, non_blocking=True)
            self._event.record()
            self._under_way = True
            self._passes.zero_()  # in order, behind the copy
        return told

    def _told(self) -> NDArray[np.float64]:
        counts: NDArray[np.float64] = self._host[:-1].numpy().copy()
        if self._event is None:
            self._passes.zero_()
        return counts
