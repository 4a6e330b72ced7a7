"""FlexGen's copies, recorded, without its relay buffers.

FlexGen's ``general_copy`` takes a copy over mixed and compressed devices apart and calls itself for
every piece; those calls come here through the module's global. What is left are copies between two
plain tensors, and here they are done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from flexgen.pytorch_backend import DeviceType, TorchTensor, general_copy, map_to_torch_tensor

from cxl_offload.integrations.flexgen.recorder import Recorder
from cxl_offload.renamed import old_names
from cxl_offload.tensor import copy_whole
from cxl_offload.transfer import CopyEngine

CopyWay = Literal["cpu", "h2d", "d2h", "gpu"]
"""Inside host memory, to the accelerator, from it, inside it."""

_take_apart = general_copy  # FlexGen's own, kept before anything is put in its place

RELAY_BYTES = 64 << 20
"""Pinned relay of a disk thread with CUDA; FlexGen's own is 2 GiB for each of four threads."""


class Copies(Protocol):
    """How bytes get between host memory and accelerator."""

    def move(self, dst: torch.Tensor, src: torch.Tensor, way: CopyWay) -> None:
        """Start ``dst[:] = src``; done at the next :meth:`synchronize` at the latest."""

    def move_from_disk_thread(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """``dst[:] = src``, done on return; one end may be a mapped file."""

    def synchronize(self) -> None:
        """Wait for everything that was started."""

    def close(self) -> None:
        """Wait, and give back what the link holds."""


class HostCopies:
    """Both ends are ordinary memory: a copy is a copy."""

    def move(self, dst: torch.Tensor, src: torch.Tensor, way: CopyWay) -> None:
        copy_whole(dst, src)

    def move_from_disk_thread(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        copy_whole(dst, src)

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""


class CudaCopies:
    """Asynchronous copies on the current stream, from and to memory that our pool pinned.

    Parameters
    ----------
    record_stream
        Tells the pool that a stream uses a tensor, so that it is not reused too early: FlexGen
        drops an activation as soon as its copy is queued.
    """

    def __init__(self, record_stream: Callable[[torch.Tensor, int], None]) -> None:
        self._record_stream = record_stream
        self._threads = threading.local()

    def move(self, dst: torch.Tensor, src: torch.Tensor, way: CopyWay) -> None:
        ends = [end for end in (dst, src) if not end.is_cuda]
        if any(not end.is_pinned() for end in ends):
            dst.copy_(src)
            return
        dst.copy_(src, non_blocking=True)
        stream = torch.cuda.current_stream().cuda_stream
        for end in ends:
            self._record_stream(end, stream)

    def move_from_disk_thread(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not dst.is_cuda and not src.is_cuda:
            copy_whole(dst, src)
            return
        if not hasattr(self._threads, "relay"):
            self._threads.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._threads.relay = torch.empty(RELAY_BYTES, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._threads.stream):
            relay_copy(dst, src, self._threads.relay)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        """The threads' relays go with the threads."""

    @staticmethod
    def stream_in_order() -> int | None:
        """The default stream, if that is the current one: what follows on it needs the copy.

        FlexGen's other streams only load ahead and store behind; it synchronizes before anything
        uses that.
        """
        current = torch.cuda.current_stream()
        return current.cuda_stream if current == torch.cuda.default_stream() else None


class EngineCopies:
    """Copies between host and accelerator by the copy engine, everything else by another link.

    Every direction and node has a queue of its own. So what FlexGen loads ahead (the next layer's
    weights, the next batch's cache) crosses from all tiers together, in the order in which FlexGen
    asks for it, and takes as long as the planner's ``max(bytes / link, bytes_i / rate_i)``.

    Parameters
    ----------
    engine
        Closed by :meth:`close`.
    others
        Copies that stay on one side, come from disk, or are of memory in pieces or not pinned.
    stream_in_order
        The stream on which the copy has a place between earlier and later work; None where the
        next :meth:`synchronize` is early enough.
    """

    def __init__(
        self, engine: CopyEngine, others: Copies, stream_in_order: Callable[[], int | None]
    ) -> None:
        self._engine = engine
        self._others = others
        self._stream_in_order = stream_in_order

    def move(self, dst: torch.Tensor, src: torch.Tensor, way: CopyWay) -> None:
        host = src if way == "h2d" else dst
        plain = dst.is_contiguous() and src.is_contiguous() and dst.dtype == src.dtype
        if way not in ("h2d", "d2h") or not plain or not self._engine.is_pinned(host):
            self._others.move(dst, src, way)
            return
        stream = self._stream_in_order()
        submit = self._engine.to_device if way == "h2d" else self._engine.to_host
        handle = submit(target=dst, source=src, after=() if stream is None else (stream,))
        if handle is not None and stream is not None:
            handle.stream_wait(stream)

    def move_from_disk_thread(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._others.move_from_disk_thread(dst, src)

    def synchronize(self) -> None:
        self._engine.drain()  # what waits for its turn is not yet on a stream of the GPU
        self._others.synchronize()

    def close(self) -> None:
        self._engine.close()
        self._others.close()


def relay_copy(dst: torch.Tensor, src: torch.Tensor, relay: torch.Tensor) -> None:
    """Copy through a buffer of bytes, as many rows at a time as it holds."""
    row_bytes = max(1, src[0].numel() * src.element_size())
    rows = relay.numel() // row_bytes
    if rows == 0:
        dst.copy_(src)  # one row is larger than the relay: slower, never wrong
        return
    for at in range(0, src.shape[0], rows):
        piece = src[at : at + rows]
        between = relay[: piece.numel() * piece.element_size()].view(piece.dtype)
        between = between.view(piece.shape)
        between.copy_(piece)
        dst[at : at + rows].copy_(between)


class Copier:
    """Takes the place of ``general_copy`` in FlexGen's modules; tells the recorder of each copy."""

    def __init__(self, link: Copies, recorder: Recorder) -> None:
        self._link = link
        self._recorder = recorder
        # NumPy reads a file's header with Python's parser, which fails at random in CPython 3.11
        # when two threads use it at once (python/cpython issue 106905).
        self._headers = threading.Lock()

    def __call__(
        self, dst: TorchTensor, dst_indices: Any, src: TorchTensor, src_indices: Any
    ) -> None:
        """``dst[dst_indices] = src[src_indices]``, done at the next barrier at the latest."""
        kinds = {src.device.device_type, dst.device.device_type}
        if kinds & {DeviceType.MIXED, DeviceType.COMPRESSED}:
            _take_apart(dst, dst_indices, src, src_indices)
            return
        if DeviceType.DISK in kinds:
            self._queue_for_disk(dst, dst_indices, src, src_indices)
            return
        to, source = _view(dst, dst_indices), _view(src, src_indices)
        if to.numel() == 0:
            return
        self._link.move(to, source, self._record(dst, to, src, source))

    def from_disk_thread(
        self, dst: TorchTensor, dst_indices: Any, src: TorchTensor, src_indices: Any
    ) -> None:
        """One queued copy; called in the disk's copy threads."""
        with self._headers:
            to = map_to_torch_tensor(dst, _plain(dst_indices))
            source = map_to_torch_tensor(src, _plain(src_indices))
        self._link.move_from_disk_thread(to, source)

    @property
    def stays_in_host_memory(self) -> bool:
        """Both ends of every copy are host memory."""
        return isinstance(self._link, HostCopies)

    def synchronize(self) -> None:
        """Wait for all copies between host and accelerator."""
        self._link.synchronize()

    def close(self) -> None:
        """Wait for them, and give back what the link holds."""
        self._link.close()

    def _queue_for_disk(
        self, dst: TorchTensor, dst_indices: Any, src: TorchTensor, src_indices: Any
    ) -> None:
        nbytes = _selected_bytes(src, src_indices)
        if nbytes == 0:
            return
        self._record_disk(dst, dst_indices, src, src_indices, nbytes)
        disk = src.device if src.device.device_type == DeviceType.DISK else dst.device
        disk.submit_copy(dst, dst_indices, src, src_indices)

    def _record_disk(
        self, dst: TorchTensor, dst_indices: Any, src: TorchTensor, src_indices: Any, nbytes: int
    ) -> None:
        """Between disk and accelerator there is a relay in host memory."""
        record = self._recorder
        if src.device.device_type == DeviceType.CPU:
            record.copied("nvme", source=_view(src, src_indices))
        elif dst.device.device_type == DeviceType.CPU:
            record.copied("nvme", target=_view(dst, dst_indices))
        elif src.device.device_type == DeviceType.DISK:
            record.buffered("nvme", nbytes, into=True)
            record.buffered("h2d", nbytes, into=False)
        else:
            record.buffered("d2h", nbytes, into=True)
            record.buffered("nvme", nbytes, into=False)

    def _record(
        self, dst: TorchTensor, to: torch.Tensor, src: TorchTensor, source: torch.Tensor
    ) -> CopyWay:
        from_host = src.device.device_type == DeviceType.CPU
        to_host = dst.device.device_type == DeviceType.CPU
        nbytes = to.numel() * to.element_size()
        if from_host and to_host:
            self._recorder.copied("cpu", source=source, target=to)
            return "cpu"
        if from_host:
            self._recorder.copied("h2d", source=source, accelerator_bytes=nbytes)
            return "h2d"
        if to_host:
            self._recorder.copied("d2h", target=to, accelerator_bytes=nbytes)
            return "d2h"
        self._recorder.copied("gpu", accelerator_bytes=2 * nbytes)
        return "gpu"


def _plain(indices: Any) -> Any:
    """Slices as a tuple; FlexGen's compressed copies give lists."""
    return None if indices is None else tuple(indices)


def _view(tensor: TorchTensor, indices: Any) -> torch.Tensor:
    data: torch.Tensor = tensor.data
    return data if indices is None else data[tuple(indices)]


def _selected_bytes(tensor: TorchTensor, indices: Any) -> int:
    shape = list(tensor.shape)
    for at, index in enumerate(indices or ()):
        start, stop, _ = index.indices(shape[at])
        shape[at] = max(0, stop - start)
    size = torch.empty((), dtype=tensor.dtype).element_size()
    elements = 1
    for length in shape:
        elements *= length
    return elements * size


__getattr__ = old_names(__name__)
