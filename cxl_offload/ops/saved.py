"""Copies of saved activations in a tier, and the two ways there and back: host and GPU streams."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cxl_offload import tensor
from cxl_offload.memory import Session
from cxl_offload.ops.beside import OneThread
from cxl_offload.plan.equations.activation_bytes import LEAVING_BYTES as _LEAVING_BYTES
from cxl_offload.renamed import old_names
from cxl_offload.tensor_bytes import check_whole

_ALIGNMENT_BYTES = 64
"""Alignment of torch's own memory. Parts begin at a multiple, so that kernels run the same code."""

_THIN = 8
"""A view brings along what lies between its elements, or the whole storage, up to this factor."""


class Order:
    """What one thread saved, in order; dead copies leave by themselves."""

    def __init__(self) -> None:
        self._copies: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        self._next = 0

    def append(self, saved: Saved) -> int:
        self._next += 1
        self._copies[self._next] = saved
        return self._next

    def before(self, number: int, count: int) -> list[Saved]:
        """The last ``count`` living copies before ``number``, latest first."""
        found: list[Saved] = []
        oldest = next(iter(self._copies.keys()), number)
        while number > oldest and len(found) < count:
            number -= 1
            saved = self._copies.get(number)
            if saved is not None:
                found.append(saved)
        return found


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` to ``start + nbytes`` of a storage."""

    start: int
    nbytes: int


def part_of(view: torch.Tensor) -> ByteRange | None:
    """The bytes to copy for a view, None for one whose elements lie too far apart.

    The whole storage where the view is at least an eighth of it, so that all views of it share one
    copy; else from its first to its last element. Strides stay as they are in both cases.
    """
    held = view.untyped_storage().nbytes()
    if held <= _THIN * view.nbytes:
        return ByteRange(0, held)
    lengths = zip(view.shape, view.stride(), strict=True)
    first = int(view.storage_offset())
    last = first + sum((length - 1) * stride for length, stride in lengths)
    start = first * view.itemsize // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    part = ByteRange(start, (last + 1) * view.itemsize - start)
    return part if part.nbytes <= _THIN * view.nbytes + _ALIGNMENT_BYTES else None


def as_bytes(view: torch.Tensor, part: ByteRange) -> torch.Tensor:
    """That part of the storage of a view; shares its memory."""
    raw = torch.empty(0, dtype=torch.uint8, device=view.device)
    return raw.set_(view.untyped_storage(), part.start, (part.nbytes,), (1,))


class Saved:
    """One copy in the tier, shared by the saved views of its storage.

    Attributes
    ----------
    source
        Marks the storage that was copied without keeping its memory; while it is held, no other
        storage can be taken for that one.
    home
        The bytes in the tier.
    handles, given
        Saved tensors that share the copy, and how many of them were given back in this backward.
    back
        The bytes on their way back or there, until all handles were given.
    left
        When they were all in the tier, where that is not at once.
    """

    __slots__ = (
        "__weakref__",
        "back",
        "given",
        "handles",
        "home",
        "left",
        "number",
        "order",
        "source",
        "way",
    )

    def __init__(
        self, source: torch.UntypedStorage, home: torch.Tensor, way: Way, order: Order
    ) -> None:
        self.source = StorageWeakRef(source)  # type: ignore[no-untyped-call]
        self.home = home
        self.way = way
        self.handles = 0
        self.given = 0
        self.back: Any = None
        self.left: Any = None
        self.order = order
        self.number = order.append(self)

    def give(self) -> torch.Tensor:
        """The bytes as the backward reads them; forgets them once the last handle has them."""
        raw = self.way.bring(self)
        self.given += 1
        if self.given >= self.handles:
            self.given = 0
            self.back = None
        return raw


class Way(Protocol):
    """How bytes go to the tier and come back."""

    def leave(self, saved: Saved, source: torch.Tensor) -> None:
        """Copies ``source`` to the home; may still run when this returns."""
        ...

    def start(self, saved: Saved) -> None:
        """Begins to bring a copy back; nothing where that was begun."""
        ...

    def bring(self, saved: Saved) -> torch.Tensor:
        """The bytes where the backward may read them."""
        ...

    def forget(self) -> None:
        """Drops what was kept for copies under way."""
        ...


class HostWay:
    """Tensors of the CPU: copied at once; brought back by a thread, or read where they are.

    Parameters
    ----------
    prefetch
        0 gives the bytes in the tier themselves to the backward.
    """

    def __init__(self, prefetch: int) -> None:
        self._in_place = prefetch == 0
        self._thread = OneThread("cxl-offload-activations")

    def leave(self, saved: Saved, source: torch.Tensor) -> None:
        tensor.copy_whole(saved.home, source)

    def start(self, saved: Saved) -> None:
        if self._in_place or saved.back is not None:
            return
        saved.back = self._thread.submit(_copied, saved.home)

    def bring(self, saved: Saved) -> torch.Tensor:
        if self._in_place:
            check_whole(saved.home)
            return saved.home
        self.start(saved)
        raw: torch.Tensor = saved.back.result()
        return raw

    def forget(self) -> None:
        """Nothing is kept."""


def _copied(home: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.copy_whole(torch.empty(home.shape, dtype=home.dtype), home)


class StreamWay:
    """Tensors of one GPU: copied on streams of their own, fenced by events; never waits on the CPU.

    Parameters
    ----------
    device
        The GPU.
    session
        The session that the homes are of.
    cuda
        ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, device: torch.device, session: Session, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._session = session
        self._cuda = cuda
        self._out = cuda.Stream(device)
        self._in = cuda.Stream(device)
        # Sources are kept until the compute stream is behind their copy: marking them used by the
        # other stream instead would let the CPU run ahead and hold all of them at once.
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()
        self._leaving_bytes = 0

    def leave(self, saved: Saved, source: torch.Tensor) -> None:
        compute = self._cuda.current_stream(self._device)
        self._out.wait_stream(compute)
        with self._cuda.stream(self._out):
            saved.home.copy_(source, non_blocking=True)
        saved.left = self._out.record_event()
        for stream in (self._out, self._in):
            tensor.record_stream(saved.home, stream.cuda_stream, session=self._session)
        self._leaving.append((saved.left, source))
        self._leaving_bytes += source.nbytes
        while self._leaving and (
            self._leaving_bytes > _LEAVING_BYTES or self._leaving[0][0].query()
        ):
            event, oldest = self._leaving.popleft()
            compute.wait_event(event)
            self._leaving_bytes -= oldest.nbytes

    def start(self, saved: Saved) -> None:
        if saved.back is not None:
            return
        compute = self._cuda.current_stream(self._device)
        # Of the compute stream's memory, whose last use is queued there already.
        raw = torch.empty(saved.home.shape, dtype=saved.home.dtype, device=self._device)
        self._in.wait_stream(compute)
        self._in.wait_event(saved.left)
        with self._cuda.stream(self._in):
            raw.copy_(saved.home, non_blocking=True)
        # Dropped unused, it must not be written by others before the copy is over.
        raw.record_stream(self._in)
        saved.back = (raw, self._in.record_event())

    def bring(self, saved: Saved) -> torch.Tensor:
        self.start(saved)
        raw: torch.Tensor
        raw, event = saved.back
        self._cuda.current_stream(self._device).wait_event(event)
        return raw

    def forget(self) -> None:
        for _, source in self._leaving:
            source.record_stream(self._out)
        self._leaving.clear()
        self._leaving_bytes = 0


__getattr__ = old_names(__name__)
