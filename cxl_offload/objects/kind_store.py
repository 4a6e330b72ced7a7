"""Host memory by kind: a tensor goes where the policy of its kind says, and is counted."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cxl_offload.memory import NOT_FAULTED_IN, FirstTouch, Policy, Preferred, Session
from cxl_offload.memory.copies import any_copies
from cxl_offload.memory.lost import add_namer
from cxl_offload.objects.kind_counts import LiveKind, count_kinds_of, nodes_in
from cxl_offload.objects.load_parts import FAULT_IN, part_of_load
from cxl_offload.tensor import empty
from cxl_offload.units import format_bytes


class TensorSource(Protocol):
    """Where placed tensors come from."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Policy, *, pin: bool
    ) -> torch.Tensor:
        """An uninitialised CPU tensor, contiguous, whose pages follow ``policy``."""

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        """Bytes of a range on every node, asked from the pages."""


class MemorySource:
    """A :class:`TensorSource` over one session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Policy, *, pin: bool
    ) -> torch.Tensor:
        """An uninitialised tensor whose pages follow ``policy``."""
        return empty(shape, dtype=dtype, policy=policy, pin=pin, session=self.session)

    def move_slice(self, part: torch.Tensor, policy: Policy) -> None:
        """Move the whole pages of a contiguous part of a tensor made here; the rest of it stays.

        A part of memory that is shared with other small tensors stays where it is.

        Raises
        ------
        MemoryError
            A target node is full.
        """
        address, owner = part.data_ptr(), self.session.find(part.data_ptr())
        if owner is None or owner.nbytes < owner.page_bytes:
            return
        first, end = address - owner.address, address - owner.address + part.nbytes
        page = owner.page_bytes
        first = -(-first // page) * page
        end = end if end == owner.nbytes else end // page * page
        if first < end:
            self.session.move_part(owner, policy, offset=first, nbytes=end - first)

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        """Bytes of a range and its copies on every node, asked from the pages that are there."""
        if any_copies():
            found = self.session.placement(address, nbytes).granted
        else:
            found = self.session.bytes_per_node(address, nbytes)
        return {node: count for node, count in found.items() if node != NOT_FAULTED_IN}

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Keep the tensor's memory from reuse until the work now on ``stream`` is done."""
        owner = self.session.find(tensor.data_ptr())
        if owner is not None:
            owner.record_stream(stream)


@dataclass(frozen=True, slots=True)
class Part:
    """A named share of a kind's bytes and its policy; a kind that is not split has one part."""

    name: str
    policy: Policy


@dataclass(slots=True)
class KindUse:
    """Bytes of one part of one kind: what was asked for and where it is.

    Attributes
    ----------
    live_bytes, peak_bytes
        Requested bytes that are alive now, and the most there ever were.
    granted
        Node to bytes, read from the pages, at the moment of the peak.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    _live: Counter[int] = field(default_factory=Counter)

    def add(self, nbytes: int, nodes: Mapping[int, int]) -> None:
        """Count a tensor that was allocated."""
        self.live_bytes += nbytes
        self._live.update(nodes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.granted = {node: count for node, count in sorted(self._live.items()) if count}

    def remove(self, nbytes: int, nodes: Mapping[int, int]) -> None:
        """Count a tensor that is gone."""
        self.live_bytes -= nbytes
        self._live.subtract(nodes)


class TierStore:
    """Allocates for kinds from a source and keeps count.

    Parameters
    ----------
    source
        Gives the memory.
    parts
        Every kind's parts, in the order of the split.
    pin
        Whether to pin what the accelerator copies from and to (only of use with CUDA).
    """

    def __init__(
        self, source: TensorSource, parts: Mapping[str, tuple[Part, ...]], *, pin: bool
    ) -> None:
        self.source = source
        self.parts = dict(parts)
        self._pin = pin
        self._lock = threading.RLock()  # a finalizer may run inside any of our own statements
        self._use: dict[tuple[str, str], KindUse] = {}
        self._alive: dict[int, tuple[str, int, int]] = {}
        self._counted = itertools.count()
        self._notes: dict[str, None] = {}
        count_kinds_of(self)
        add_namer(self)

    def __repr__(self) -> str:
        parts = (f"{kind}: {each.policy}" for kind, many in self.parts.items() for each in many)
        return f"<memory by kind, {', '.join(parts)}>"

    def empty(
        self, kind: str, part: int, shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool
    ) -> torch.Tensor:
        """A tensor for ``kind``, in its ``part``-th part.

        Raises
        ------
        MemoryError
            A node is too full for it.
        """
        policy = self.parts[kind][part].policy
        with part_of_load(FAULT_IN, math.prod(shape) * dtype.itemsize):
            if isinstance(policy, FirstTouch):
                return self._touched_here(shape, dtype, pin=pin and self._pin)
            return self.source.empty(shape, dtype, policy, pin=pin and self._pin)

    def _touched_here(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool
    ) -> torch.Tensor:
        """Memory of first touch, as if this thread had touched it.

        It is asked of this thread's node, because memory that was touched before cannot be first
        touched again: activations would be mapped and faulted in anew at every layer.
        """
        if isinstance(self.source, MemorySource):
            near = Preferred((self.source.session.kernel.local_node,))
            with contextlib.suppress(MemoryError):  # the system may still give what we hold back
                return self.source.empty(shape, dtype, near, pin=pin)
        tensor = self.source.empty(shape, dtype, FirstTouch(), pin=pin)
        tensor.view(-1).view(torch.uint8).zero_()
        return tensor

    def lies_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor needs no pinning: it is pinned, or this store pins nothing."""
        if not self._pin or not isinstance(self.source, MemorySource):
            return not self._pin
        owner = self.source.session.find(tensor.data_ptr())
        return owner is not None and owner.pinned

    def move_slice(self, kind: str, part: int, tensor: torch.Tensor) -> None:
        """Move the whole pages of a contiguous slice of what :meth:`empty` made to a part's place.

        Raises
        ------
        TypeError
            The source moves nothing.
        MemoryError
            A node is too full for it.
        """
        if not isinstance(self.source, MemorySource):
            raise TypeError(f"{type(self.source).__name__} cannot move parts of tensors")
        self.source.move_slice(tensor, self.parts[kind][part].policy)

    def count(self, owner: object, kind: str, part: int, tensor: torch.Tensor) -> None:
        """Count ``tensor`` under ``kind`` for as long as ``owner`` lives."""
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        nodes = self.source.bytes_per_node(tensor.data_ptr(), nbytes)
        key = (kind, self.parts[kind][part].name)
        with self._lock:
            use = self._use.setdefault(key, KindUse())
            use.add(nbytes, nodes)
            number = next(self._counted)
            self._alive[number] = (kind, tensor.data_ptr(), nbytes)
            self._notes.update(dict.fromkeys(f"{kind}: {note}" for note in self._said_of(tensor)))
        ending = weakref.finalize(owner, self._uncount, use, number, nbytes, nodes)
        ending.atexit = False

    def _uncount(self, use: KindUse, number: int, nbytes: int, nodes: Mapping[int, int]) -> None:
        with self._lock:
            use.remove(nbytes, nodes)
            del self._alive[number]

    def add_live_kinds(self, found: dict[str, LiveKind]) -> None:
        """See :class:`~cxl_offload.objects.kind_counts.CountsKinds`."""
        with self._lock:
            alive = list(self._alive.values())
        for kind, address, nbytes in alive:
            nodes = (
                nodes_in(self.source.session, address, nbytes)
                if isinstance(self.source, MemorySource)
                else ()
            )
            found.setdefault(kind, LiveKind()).add(nbytes, nodes)

    def named(self, address: int) -> tuple[str, int] | None:
        """As of :class:`cxl_offload.memory.lost.MemoryNamer`: the kind, where no more is known."""
        with self._lock:
            alive = list(self._alive.values())
        for kind, begin, nbytes in alive:
            if begin <= address < begin + nbytes:
                return f"a tensor of {kind} ({format_bytes(nbytes)})", begin
        return None

    def _said_of(self, tensor: torch.Tensor) -> list[str]:
        """Where a tensor's place differs from its policy, and why."""
        if not isinstance(self.source, MemorySource):
            return []
        owner = self.source.session.find(tensor.data_ptr())
        return [] if owner is None else owner.notes

    def notes(self) -> tuple[str, ...]:
        """Where places of counted tensors differ from what was asked, each once, by kind."""
        with self._lock:
            return tuple(self._notes)

    def use(self) -> dict[tuple[str, str], KindUse]:
        """Every kind and part that ever held a tensor."""
        with self._lock:
            return dict(self._use)
