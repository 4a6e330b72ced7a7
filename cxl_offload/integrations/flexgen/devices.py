"""FlexGen's devices with our memory behind them: host, compressed host, split cache and disk.

FlexGen only asks a device for its type and calls its methods, so these are subclasses of its own
classes and the package stays as it is.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from flexgen.compression import TorchCompressedDevice
from flexgen.pytorch_backend import (
    TorchDevice,
    TorchDisk,
    TorchMixedDevice,
    TorchTensor,
    fix_recursive_import,
)
from flexgen.utils import np_dtype_to_torch_dtype

from cxl_offload.integrations.flexgen.places import FlexGenKind
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.units import format_bytes

fix_recursive_import()  # FlexGen's devices need what its compression module defines


MOST_KEPT_BYTES = 1 << 18
"""Of an activation whose memory is used again: those of decoding, not those of prompts."""

MOST_WAITING = 8
"""Activations whose memory waits for the next ones, all of one shape."""


class TierTensor(TorchTensor):  # type: ignore[misc]
    """A tensor in a tier, read where it lies by a device whose memory is the host's too."""

    lease: _Lease | None = None
    """Of an activation: gives its memory back when neither this nor a view of it is read."""

    def copy(self, dst: Any, src_indices: Any = None) -> TorchTensor:
        """A copy on ``dst``; a view, as the device says, where there is nothing to cross."""
        if isinstance(dst, SharesHostMemory) and dst.loads_nothing:
            return dst.view_of(self, src_indices)
        return super().copy(dst, src_indices)


class _Counted:
    """Memory of the store, counted for as long as this lives."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


class _Lease:
    """Returns memory to those that wait for the next activation of its shape."""

    __slots__ = ("_memory", "_waiting")

    def __init__(self, memory: _Counted, waiting: list[_Counted]) -> None:
        self._memory, self._waiting = memory, waiting

    def __del__(self) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(self._memory)


class SharesHostMemory(ABC):
    """A device that computes in host memory, so that nothing has to be loaded to it.

    ``loads_nothing`` is False where it stands for one that has memory of its own.
    """

    loads_nothing: bool

    @abstractmethod
    def view_of(self, tensor: TierTensor, indices: Any) -> TorchTensor:
        """The tensor, or a part of it, as one of this device; it is only read."""


class HostDevice(TorchDevice):  # type: ignore[misc]
    """A CPU device of FlexGen whose tensors come from the tiers.

    What a tensor is for decides where it goes. FlexGen does not say, but it allocates each kind in
    its own method, so those methods name the kind and everything else is an activation.

    Parameters
    ----------
    store
        Gives and counts the memory.
    part
        Which part of a split kind this device stands for.
    kind
        What tensors are for unless a method says otherwise.
    has_workspace
        CPU attention reads single-precision copies of the cache; False: the cache itself.
    keeps_activations
        Memory of small activations is used again for the next ones. Not where a GPU may still copy
        from what was deleted.
    """

    def __init__(
        self,
        store: TierStore,
        *,
        part: int = 0,
        kind: FlexGenKind = "act",
        has_workspace: bool = True,
        keeps_activations: bool = False,
    ) -> None:
        super().__init__("cpu")
        self._keeps_activations = keeps_activations
        self.compressed_device = CompressedHost(self)
        self.store = store
        self._part = part
        self._kind: FlexGenKind = kind
        self._has_workspace = has_workspace
        self._waiting: list[_Counted] = []
        self._waiting_form: tuple[Any, ...] = ()  # shape, type and pinning
        self.cache: SplitCache | None = None
        """Makes the KV cache when its policy is a split over several tiers."""

    @contextlib.contextmanager
    def as_kind(self, kind: FlexGenKind) -> Iterator[None]:
        """Tensors allocated inside are for ``kind``."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def allocate(
        self,
        shape: Sequence[int],
        dtype: Any,
        pin_memory: bool | None = None,
        name: str | None = None,
    ) -> TorchTensor:
        """A tensor of the current kind; pinned unless FlexGen wants it pageable for another
        reason than size (it leaves the KV cache pageable because torch rounds pinned blocks up to
        a power of two, which our memory does not)."""
        pin = self._kind == "kv" or pin_memory is None or pin_memory
        torch_dtype = np_dtype_to_torch_dtype[dtype]
        nbytes = math.prod(shape) * torch_dtype.itemsize
        if self._kind == "act" and self._keeps_activations and nbytes <= MOST_KEPT_BYTES:
            return self._activation(tuple(shape), torch_dtype, pin, name)
        return self._new(tuple(shape), torch_dtype, pin, name)

    def _new(
        self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool, name: str | None = None
    ) -> TierTensor:
        data = self.store.empty(self._kind, self._part, shape, dtype, pin=pin)
        tensor: TierTensor = TierTensor.create_from_torch(data, self, name=name)
        self.store.count(tensor, self._kind, self._part, data)
        return tensor

    def _activation(
        self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool, name: str | None
    ) -> TierTensor:
        """One in memory of an earlier one, which stays counted meanwhile.

        Every layer and batch of a decoded token makes an activation, and to ask for memory and
        where it lies takes much longer than to fill it.
        """
        if self._waiting_form != (shape, dtype, pin):  # those of prompts go before others come
            self._waiting, self._waiting_form = [], (shape, dtype, pin)
        if self._waiting:
            memory = self._waiting.pop()
        else:
            memory = _Counted(self.store.empty("act", self._part, shape, dtype, pin=pin))
            self.store.count(memory, "act", self._part, memory.data)
        tensor: TierTensor = TierTensor.create_from_torch(memory.data, self, name=name)
        tensor.lease = _Lease(memory, self._waiting)
        return tensor

    def forget_activations(self) -> None:
        """Give back the memory that no activation uses."""
        self._waiting, self._waiting_form = [], ()

    def init_cache_one_gpu_batch(self, config: Any, task: Any, policy: Any) -> Any:
        """KV cache of one layer and batch, over several tiers when its policy is a split."""
        if self.cache is not None:
            return self.cache.init_cache_one_gpu_batch(config, task, policy)
        with self.as_kind("kv"):
            return super().init_cache_one_gpu_batch(config, task, policy)

    def init_attention_compute_workspace(self, config: Any, task: Any, policy: Any) -> None:
        """The fp32 copies that CPU attention reads, two whenever one is filled ahead.

        FlexGen makes one when attention and MLP are separate layers, but with overlap and several
        batches it loads the next batch's cache before this one is computed, into the same memory.
        """
        if not self._has_workspace:
            return
        with self.as_kind("workspace"):
            super().init_attention_compute_workspace(config, task, policy)
            if policy.compress_cache or not policy.sep_layer:
                return  # compressed: two already, never filled ahead; not separate: two already
            if policy.overlap and policy.num_gpu_batches > 1:
                k_first, v_first = self.attention_compute_workspace[0]
                second = tuple(
                    self.allocate(tuple(x.shape), np.float32, pin_memory=False)
                    for x in (k_first, v_first)
                )
                self.attention_compute_workspace.append(second)

    def del_attention_compute_workspace(self) -> None:
        """Give both kinds of workspace back."""
        super().del_attention_compute_workspace()
        self.compressed_device.release_workspace()

    def extend_attention_mask(self, attention_mask: TorchTensor, donate: Sequence[bool]) -> Any:
        """The mask with one more column of ones, in the tier of the activations."""
        self.forget_activations()  # those of a prompt would be held beside the mask
        rows, columns = attention_mask.shape
        longer = self._new((rows, columns + 1), torch.bool, True)
        longer.data[:, :columns] = attention_mask.data
        longer.data[:, columns:] = True
        if donate[0]:
            attention_mask.delete()
        return longer

    def synchronize(self) -> None:
        """Nothing to wait for: the CPU's work is done when it returns."""


class CompressedHost(TorchCompressedDevice):  # type: ignore[misc]
    """Compressed tensors on the host, with cache and workspace in their tiers."""

    base_device: HostDevice
    data_decompress_workspace: list[torch.Tensor] | None

    def init_cache_one_gpu_batch(self, config: Any, task: Any, policy: Any) -> Any:
        """Compressed KV cache of one layer and batch."""
        with self.base_device.as_kind("kv"):
            return super().init_cache_one_gpu_batch(config, task, policy)

    def init_attention_compute_workspace(self, config: Any, task: Any, policy: Any) -> None:
        """The fp32 workspace of decompression; FlexGen takes it past its own device."""
        compression = policy.comp_cache_config
        batch_heads = policy.gpu_batch_size * config.n_head
        shape = [task.prompt_len + task.gen_len - 1, batch_heads, config.input_dim // config.n_head]
        at = compression.group_dim
        groups = -(-shape[at] // compression.group_size)
        shape[at : at + 1] = [groups, compression.group_size]
        with self.base_device.as_kind("workspace"):
            held = [self.base_device.allocate(shape, np.float32, pin_memory=False) for _ in "kv"]
        self._workspace = held  # counted for as long as these live
        self.data_decompress_workspace = [x.data for x in held]

    def release_workspace(self) -> None:
        """Give the workspace back."""
        self._workspace = []
        self.data_decompress_workspace = None


class SplitCache(TorchMixedDevice):  # type: ignore[misc]
    """KV cache over accelerator, any number of host tiers and disk, by whole sequences.

    Parameters
    ----------
    base_devices
        Accelerator first (FlexGen's attention over two devices looks there), disk last.
    sequences
        Of one batch on every base device.
    """

    def __init__(self, base_devices: Sequence[Any], sequences: Sequence[int]) -> None:
        super().__init__(list(base_devices))
        self.sequences = tuple(sequences)

    def init_cache_one_gpu_batch(self, config: Any, task: Any, policy: Any) -> Any:
        """K and V of one layer and batch."""
        heads = config.n_head
        shape = (
            task.prompt_len + task.gen_len - 1,
            policy.gpu_batch_size * heads,
            config.input_dim // heads,
        )
        lengths = [count * heads for count in self.sequences]
        with contextlib.ExitStack() as kinds:
            for device in self.base_devices:
                if isinstance(device, HostDevice):
                    kinds.enter_context(device.as_kind("kv"))
            return tuple(self.allocate(shape, np.float16, lengths, pin_memory=False) for _ in "kv")


class TierDisk(TorchDisk):  # type: ignore[misc]
    """FlexGen's disk with copy threads that hold no relay of 2 GiB each and report their errors.

    Threads start with the first copy, so a run without a disk share has none.

    Parameters
    ----------
    folder
        Of this run alone; the caller removes it.
    copy
        Does one copy between the tensors of a queue item.
    """

    COPY_THREADS = 4

    def __init__(self, folder: str, copy: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__(folder, num_copy_threads=0)
        self.copy_threads: list[threading.Thread] = []
        self._copy = copy
        self._errors: list[BaseException] = []

    def allocate(
        self,
        shape: Sequence[int],
        dtype: Any,
        pin_memory: bool | None = None,
        name: str | None = None,
    ) -> TorchTensor:
        """A file with its blocks reserved: a disk that fills up later would be a fatal signal.

        Raises
        ------
        OSError
            The disk has no room for it.
        """
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        free = shutil.disk_usage(self.path).free
        if nbytes > free:
            raise OSError(
                f"disk tier {self.path}: {format_bytes(nbytes)} needed, {format_bytes(free)} free"
            )
        tensor = super().allocate(tuple(shape), dtype, pin_memory, name)
        with open(tensor.data, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return tensor

    def submit_copy(self, *item: Any) -> None:
        """Queue ``(dst, dst_indices, src, src_indices)`` for the copy threads."""
        if not self.copy_threads:
            self.copy_threads = [
                threading.Thread(
                    target=_copy_items,
                    args=(self.copy_queue, self._copy, self._errors),
                    name=f"cxl_offload-flexgen-disk-{at}",
                    daemon=True,
                )
                for at in range(self.COPY_THREADS)
            ]
            for thread in self.copy_threads:
                thread.start()
        self.copy_queue.put_nowait(item)

    def synchronize(self) -> None:
        """Wait for every queued copy.

        Raises
        ------
        Exception
            The first error that a copy met.
        """
        self.copy_queue.join()
        if self._errors:
            raise self._errors[0]

    def close_copy_threads(self) -> None:
        """End the threads; calling again does nothing."""
        if self.copy_queue is None:
            return
        super().close_copy_threads()
        self.copy_threads = []
        self._errors.clear()


def _copy_items(
    items: queue.Queue[Any], copy: Callable[[Any, Any, Any, Any], None], errors: list[BaseException]
) -> None:
    """Body of a copy thread. It keeps an error for the waiting thread, which would hang without."""
    while True:
        item = items.get()
        try:
            if item is None:
                return
            copy(*item)
        except BaseException as error:  # handed over in TierDisk.synchronize
            errors.append(error)
        finally:
            del item
            items.task_done()
