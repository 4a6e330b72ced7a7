"""Copies to an accelerator that are queued in parts, so that others come between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from cxl_offload.transfer import CopyHandle


class WeightCopies(Protocol):
    """What a stream of weights asks of an accelerator."""

    device: torch.device

    def stream(self) -> int:
        """What is computed is queued on this now."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        """Queue a copy behind what streams have queued now."""

    def wait_for(self, handle: CopyHandle) -> None:
        """What is queued from now on runs behind the copy."""

    def close(self) -> None:
        """Wait for all copies and end."""


class _Share(NamedTuple):
    """A copy that is not queued yet: both ends flat, what it runs behind, and who waits for it."""

    target: torch.Tensor
    source: torch.Tensor
    after: Callable[[], Sequence[int]]
    coming: list[CopyHandle]


class PartedCopies:
    """Queues what it is given at once, or as many bytes at a time as :meth:`begin` says.

    Parameters
    ----------
    copies
        To the accelerator.
    """

    def __init__(self, copies: WeightCopies) -> None:
        self._copies = copies
        self._parts = 1
        self._holds = False
        self._left: list[_Share] = []

    def begin(self, parts: int) -> None:
        """What is put before the next :meth:`more` is queued by so many calls of it; 1: at once."""
        self.rest()
        self._parts, self._holds = max(1, parts), parts > 1

    def put(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Callable[[], Sequence[int]],
        coming: list[CopyHandle],
    ) -> None:
        """A copy of contiguous bytes.

        Parameters
        ----------
        after
            Says the streams behind whose work it is queued, when it is.
        coming
            Gets the handles of it.
        """
        if self._holds:
            self._left.append(_Share(target.view(-1), source.view(-1), after, coming))
        else:
            coming.append(self._copies.copy(target, source, after()))

    def more(self) -> None:
        """Queue the next part, if any is left; the last one holds all that is."""
        self._holds = False
        wanted = math.ceil(sum(each.source.nbytes for each in self._left) / self._parts)
        self._parts = max(1, self._parts - 1)
        while wanted > 0:
            share = self._left.pop(0)
            count = min(share.source.numel(), math.ceil(wanted / share.source.itemsize))
            if count < share.source.numel():
                rest = share._replace(target=share.target[count:], source=share.source[count:])
                self._left.insert(0, rest)
            target, source = share.target[:count], share.source[:count]
            share.coming.append(self._copies.copy(target, source, share.after()))
            wanted -= source.nbytes

    def rest(self) -> None:
        """Queue all that is left."""
        self._parts = 1
        self.more()

    def drop(self) -> None:
        """Forget what is left."""
        self._left.clear()
