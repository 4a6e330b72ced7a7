"""Weights that lie in tiers and are copied to an accelerator one stage ahead of their use.

A stage is a decoder layer, or a module beside the layers, as the head. Two buffers on the
accelerator take the weights of one stage each: while a stage computes with the one, the copy
engine fills the other. Parameters show the buffer while their stage computes and the tier at all
other times.

Where a layer computes its rows in parts, and their hidden states come over the same link, the
weights of the next stage are copied in as many parts, one beside each: else the second part of the
rows would wait behind all of them.

Of a layer's experts those that its tokens ask for are copied, when its router has said which; where
the tokens of a pass leave out less than one in the mean, all are copied with the layer, ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from cxl_offload.integrations.transformers.asked_experts import StackedExperts
from cxl_offload.integrations.transformers.parted_copies import PartedCopies, WeightCopies
from cxl_offload.objects.experts import runs_of
from cxl_offload.transfer import CopyHandle

_ALIGNMENT = 256
"""Bytes that every weight in a buffer begins at a multiple of, as CUDA's own allocations do."""


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
    experts
        Those whose stacks are among the weights.
    """

    name: str
    module: nn.Module
    weights: tuple[torch.Tensor, ...]
    experts: tuple[StackedExperts, ...] = ()

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

    def places_of(self, experts: StackedExperts) -> list[int]:
        """Where their stacks are among the weights."""
        stacked = set(experts.weights)
        return [at for at, each in enumerate(self.weights) if each in stacked]

    def places_beside_experts(self) -> list[int]:
        """Where all other weights are."""
        stacked = {weight for each in self.experts for weight in each.weights}
        return [at for at, each in enumerate(self.weights) if each not in stacked]

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
    there: dict[int, set[int]] = field(default_factory=dict)
    """Numbers of the experts that are here or on their way, by their place in the stage."""
    experts_coming: list[CopyHandle] = field(default_factory=list)
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
        self.there = {}
        for handle in (*self.coming, *self.experts_coming):
            try:
                handle.wait()
            except OSError:  # a copy of what nobody asks for any more
                continue
        self.coming.clear()
        self.experts_coming.clear()


class _Computing(NamedTuple):
    """A stage that computes: the buffer that it reads, and its weights as they lie in tiers."""

    buffer: _Buffer
    homes: list[torch.Tensor]


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
    rows_at_once
        Rows of a layer whose hidden states the same copies bring, and :meth:`copy_more` is called
        for each time; None: they are on the accelerator.

    Attributes
    ----------
    copied_bytes
        Handed to the copies so far, or to be while the same stage computes.
    expert_copied_bytes
        Of these, experts.
    expert_bytes
        All experts of the layers that have computed, counted at every pass: what copying whole
        layers would have copied.
    """

    def __init__(
        self,
        stages: Sequence[WeightStage],
        copies: WeightCopies,
        rows_at_once: int | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._copies = copies
        self._rows_at_once = rows_at_once
        self._parted = PartedCopies(copies)
        self._follows = {at: (at + 1) % len(stages) for at in range(len(stages))}
        self._last: int | None = None
        self._computing: dict[int, _Computing] = {}
        self.copied_bytes = self.expert_copied_bytes = self.expert_bytes = 0
        size = max((stage.nbytes for stage in stages), default=0)
        with torch.inference_mode(False):
            self._buffers = [
                _Buffer(torch.empty(size, dtype=torch.uint8, device=copies.device))
                for _ in range(min(2, len(stages)))
            ]

    def begin(self, at: int, tokens: int | None = None, rows: int = 1) -> None:
        """The module of a stage computes next: its weights are on the accelerator then.

        Experts are when they have been asked for, or all at once where it is not sure that they
        will be.

        Parameters
        ----------
        tokens
            That a decoder layer computes; None: not known, and all experts are copied.
        rows
            That these tokens are of.

        Raises
        ------
        OSError
            The driver refused a copy of them.
        """
        self.end(at)  # an interrupt may have left it open
        if self._last is not None:
            self._follows[self._last] = at
        self._last = at
        stage = self._stages[at]
        buffer = next((each for each in self._buffers if each.holds == at), self._buffers[0])
        if self._is_old(buffer, at):
            self._fill(buffer, at)
        self._copy_whole_experts(buffer, at, math.inf if tokens is None else tokens)
        self._wait(buffer, buffer.coming)
        if not all(experts.reads_only_asked for experts in stage.experts):
            self._wait(buffer, buffer.experts_coming)
        self._computing[at] = _Computing(buffer, [weight.data for weight in stage.weights])
        self.expert_bytes += sum(weight.nbytes for each in stage.experts for weight in each.weights)
        for weight, view in zip(stage.weights, buffer.views_of(at, stage), strict=True):
            show(weight, view)
        parts = 1 if self._rows_at_once is None else math.ceil(rows / self._rows_at_once)
        self._copy_next(buffer, at, tokens, parts)

    def copy_more(self) -> None:
        """Queue the next part of the weights of the stage that follows, if any is left."""
        self._parted.more()

    def ask(self, at: int, which: int, numbers: Callable[[], Collection[int]]) -> None:
        """A stage that computes reads these experts next: they are on the accelerator then.

        Parameters
        ----------
        which
            Of the stage's layers of experts.
        numbers
            Says which; not called where all are there, so that nobody waits for the router.

        Raises
        ------
        OSError
            The driver refused a copy of them.
        """
        if at not in self._computing:
            return
        buffer = self._computing[at].buffer
        if len(buffer.there.get(which, ())) < self._stages[at].experts[which].count:
            self._copy_experts(buffer, at, which, numbers())
        self._wait(buffer, buffer.experts_coming)

    def end(self, at: int) -> None:
        """The module has queued its work; its weights are in their tiers again."""
        self._parted.rest()
        if at not in self._computing:
            return
        buffer, homes = self._computing[at]
        buffer.reader = self._copies.stream()
        for weight, home in zip(self._stages[at].weights, homes, strict=True):
            show(weight, home)
        del self._computing[at]  # last, so that an interrupt loses no home

    def end_all(self) -> None:
        """No stage computes: an interrupt ends a pass without the end of its stages."""
        self._parted.rest()
        for at in list(self._computing):
            self.end(at)

    def close(self) -> None:
        """Show all weights in their tiers, and hold nothing on the accelerator any more."""
        self._parted.drop()
        self.end_all()
        for buffer in self._buffers:
            buffer.forget()
        self._buffers.clear()

    def _copy_next(self, in_use: _Buffer, now: int, tokens: int | None, parts: int) -> None:
        """The weights of the stage that follows, or the first part of them."""
        at = self._follows[now]
        other = next((each for each in self._buffers if each is not in_use), None)
        if other is None or in_use.holds == at:
            return
        self._parted.begin(parts)
        if self._is_old(other, at):
            self._fill(other, at)
        if at > now and tokens is not None:  # a new pass has tokens of its own
            self._copy_whole_experts(other, at, tokens)
        self._parted.more()

    def _wait(self, buffer: _Buffer, coming: list[CopyHandle]) -> None:
        try:
            for handle in coming:
                self._copies.wait_for(handle)
        except OSError:
            buffer.forget()
            raise
        coming.clear()

    def _copy_whole_experts(self, buffer: _Buffer, at: int, tokens: float) -> None:
        """All experts, where they are not copied one by one for so many tokens."""
        for which, experts in enumerate(self._stages[at].experts):
            if not experts.one_by_one(tokens):
                self._copy_experts(buffer, at, which, experts.all)

    def _copy_experts(self, buffer: _Buffer, at: int, which: int, numbers: Collection[int]) -> None:
        """Those that are not there, neighbours together, behind what reads the buffer still."""
        stage = self._stages[at]
        there = buffer.there.setdefault(which, set())
        missing = set(numbers) - there
        if not missing:
            return
        computing = self._computing.get(at)
        homes = computing.homes if computing else [weight.data for weight in stage.weights]
        views, after = buffer.views_of(at, stage), functools.partial(self._after, buffer)
        places = stage.places_of(stage.experts[which])
        for begin, end in runs_of(missing):
            for place in places:
                target, source = views[place][begin:end], homes[place][begin:end]
                self._parted.put(target, source, after, buffer.experts_coming)
                self.copied_bytes += source.nbytes
                self.expert_copied_bytes += source.nbytes
        there |= missing

    def _after(self, buffer: _Buffer) -> tuple[int]:
        """The stream that a copy to a buffer runs behind."""
        return (self._copies.stream() if buffer.reader is None else buffer.reader,)

    def _is_old(self, buffer: _Buffer, at: int) -> bool:
        """Whether a buffer has other weights than this stage, or has them from before a change."""
        return buffer.holds != at or buffer.versions != self._stages[at].versions()

    def _fill(self, buffer: _Buffer, at: int) -> None:
        """Copy a stage behind what reads the buffer still."""
        buffer.forget()
        stage = self._stages[at]
        versions, views = stage.versions(), buffer.views_of(at, stage)
        after = functools.partial(self._after, buffer)
        for place in stage.places_beside_experts():
            weight = stage.weights[place]
            self._parted.put(views[place], weight.data, after, buffer.coming)
            self.copied_bytes += weight.nbytes
        buffer.holds, buffer.versions = at, versions
