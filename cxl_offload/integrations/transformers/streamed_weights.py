"""Weights that lie in tiers and are copied to an accelerator one stage ahead of their use.

A stage is a decoder layer, or a module beside the layers, as the head. Two buffers on the
accelerator take the weights of one stage each: while a stage computes with the one, the copy
engine fills the other. Parameters show the buffer while their stage computes and the tier at all
other times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from cxl_offload.transfer import CopyHandle

_ALIGNMENT = 256
"""Bytes that every weight in a buffer begins at a multiple of, as CUDA's own allocations do."""


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


def show(weight: torch.Tensor, data: torch.Tensor) -> None:
    """Let a weight have these bytes, wherever they are; it stays the same object."""
    weight.data = data


@dataclass(frozen=True, slots=True)
class WeightStage:
    """A module, and the weights that it is given on the accelerator.

    Attributes
    ----------
    name
        Dotted, of the module.
    weights
        Each once, with its bytes in a tier while the module does not compute.
    """

    name: str
    module: nn.Module
    weights: tuple[torch.Tensor, ...]

    def offsets(self) -> list[int]:
        """Where each weight begins in a buffer, and behind the last one the bytes of all."""
        found = [0]
        for weight in self.weights:
            found.append(found[-1] + math.ceil(weight.nbytes / _ALIGNMENT) * _ALIGNMENT)
        return found

    @property
    def nbytes(self) -> int:
        """What a buffer of this stage takes."""
        return self.offsets()[-1]

    def versions(self) -> list[int]:
        """Other numbers after a weight has been written to by torch."""
        return [0 if each.is_inference() else each._version for each in self.weights]


@dataclass(slots=True)
class _Buffer:
    """Memory on the accelerator with the weights of one stage, or with nothing of use."""

    memory: torch.Tensor
    holds: int | None = None
    versions: list[int] = field(default_factory=list)
    coming: list[CopyHandle] = field(default_factory=list)
    reader: int | None = None
    """The stream that the buffer was read on last."""
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def views_of(self, at: int, stage: WeightStage) -> list[torch.Tensor]:
        """The weights of a stage, as they lie here."""
        if at not in self.views:
            self.views[at] = [
                self.memory[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
                for begin, weight in zip(stage.offsets(), stage.weights, strict=False)
            ]
        return self.views[at]

    def forget(self) -> None:
        """Hold nothing; copies under way end first, so that none comes after the next ones."""
        self.holds = None
        coming, self.coming = self.coming, []
        for handle in coming:
            try:
                handle.wait()
            except OSError:  # a copy of what nobody asks for any more
                continue


class WeightStream:
    """Gives every stage its weights on the accelerator while it computes, those of the next ahead.

    The order of stages is that of the pass before; where another one comes than was expected, it
    is copied then and waited for.

    Parameters
    ----------
    stages
        In the order in which they are expected to compute first; their weights are contiguous,
        and pinned where the copies ask for that.
    copies
        To the accelerator.

    Attributes
    ----------
    copied_bytes
        Handed to the copies so far.
    """

    def __init__(self, stages: Sequence[WeightStage], copies: WeightCopies) -> None:
        self._stages = tuple(stages)
        self._copies = copies
        self._follows = {at: (at + 1) % len(stages) for at in range(len(stages))}
        self._last: int | None = None
        self._at_home: dict[int, list[torch.Tensor]] = {}
        self.copied_bytes = 0
        size = max((stage.nbytes for stage in stages), default=0)
        with torch.inference_mode(False):
            self._buffers = [
                _Buffer(torch.empty(size, dtype=torch.uint8, device=copies.device))
                for _ in range(min(2, len(stages)))
            ]

    def begin(self, at: int) -> None:
        """The module of a stage computes next: its weights are on the accelerator then.

        Raises
        ------
        OSError
            The driver refused a copy of them.
        """
        if self._last is not None:
            self._follows[self._last] = at
        self._last = at
        stage = self._stages[at]
        buffer = next((each for each in self._buffers if each.holds == at), self._buffers[0])
        if self._is_old(buffer, at):
            self._fill(buffer, at)
        try:
            for handle in buffer.coming:
                self._copies.wait_for(handle)
        except OSError:
            buffer.forget()
            raise
        buffer.coming.clear()
        self._at_home[at] = [weight.data for weight in stage.weights]
        for weight, view in zip(stage.weights, buffer.views_of(at, stage), strict=True):
            show(weight, view)
        self._copy_next(buffer, self._follows[at])

    def end(self, at: int) -> None:
        """The module has queued its work; its weights are in their tiers again."""
        homes = self._at_home.pop(at, None)
        if homes is None:
            return
        for weight, home in zip(self._stages[at].weights, homes, strict=True):
            show(weight, home)
        for buffer in self._buffers:
            if buffer.holds == at:
                buffer.reader = self._copies.stream()

    def close(self) -> None:
        """Show all weights in their tiers, and hold nothing on the accelerator any more."""
        for at in list(self._at_home):
            self.end(at)
        for buffer in self._buffers:
            buffer.forget()
        self._buffers.clear()

    def _copy_next(self, in_use: _Buffer, at: int) -> None:
        other = next((each for each in self._buffers if each is not in_use), None)
        if other is not None and in_use.holds != at and self._is_old(other, at):
            self._fill(other, at)

    def _is_old(self, buffer: _Buffer, at: int) -> bool:
        """Whether a buffer has other weights than this stage, or has them from before a change."""
        return buffer.holds != at or buffer.versions != self._stages[at].versions()

    def _fill(self, buffer: _Buffer, at: int) -> None:
        """Copy a stage behind what reads the buffer still."""
        buffer.forget()
        stage = self._stages[at]
        after = {self._copies.stream()} if buffer.reader is None else {buffer.reader}
        versions = stage.versions()
        for weight, view in zip(stage.weights, buffer.views_of(at, stage), strict=True):
            buffer.coming.append(self._copies.copy(view, weight.data, tuple(after)))
            self.copied_bytes += weight.nbytes
        buffer.holds, buffer.versions = at, versions
