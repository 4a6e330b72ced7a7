"""Copies between host memory and an accelerator that somebody is told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from cxl_offload.integrations.transformers.streamed_states import StateCopies
from cxl_offload.transfer import CopyHandle

Told = Callable[[Literal["h2d", "d2h"], str, torch.Tensor], None]
"""Is given the direction, the kind of tensor and the bytes in host memory."""


class WatchedCopies:
    """Copies of one kind of tensor.

    Parameters
    ----------
    copies
        Make them.
    kind
        As of :class:`cxl_offload.sim.trace.Event`.
    told
        Called for every copy that was queued.
    """

    def __init__(self, copies: StateCopies, kind: str, told: Told) -> None:
        self.device = copies.device
        self._copies, self._kind, self._told = copies, kind, told
        self.stream, self.behind = copies.stream, copies.behind
        self.wait_for, self.finish, self.close = copies.wait_for, copies.finish, copies.close

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        """To the accelerator."""
        handle = self._copies.copy(target, source, after)
        self._told("h2d", self._kind, source)
        return handle

    def copy_back(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]
    ) -> CopyHandle:
        """To the host."""
        handle = self._copies.copy_back(target, source, after)
        self._told("d2h", self._kind, target)
        return handle
