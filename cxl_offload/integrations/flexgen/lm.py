"""FlexGen's model with weights in tiers, every phase recorded and everything given back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flexgen.flex_opt import DUMMY_WEIGHT, OptLM, Policy
from flexgen.opt_config import OptConfig
from flexgen.pytorch_backend import DeviceType, TorchTensor
from flexgen.utils import ExecutionEnv, ValueHolder, torch_dtype_to_np_dtype

from cxl_offload.integrations.flexgen.recorder import Queue, Recorder
from cxl_offload.objects.load_parts import READING, part_of_load
from cxl_offload.plan.flexgen.layout import weight_homes
from cxl_offload.renamed import old_names

Spec = tuple[tuple[int, ...], type, str]
LoadProgress = Callable[[int, int], None]


class WeightPlacer:
    """FlexGen's ``init_weight_list`` for any number of homes.

    Parameters
    ----------
    cuts
        Percent at which a group is cut, one cut between every two homes.

    Attributes
    ----------
    homes
        Devices in the same order: disk, host parts, accelerator. FlexGen's globals must be in
        place before its devices can be made, so they come after this.
    """

    def __init__(self, cuts: Sequence[float]) -> None:
        self.homes: Sequence[Any] = ()
        self._cuts = cuts

    def __call__(self, specs: Sequence[Spec], policy: Policy, _: ExecutionEnv) -> list[TorchTensor]:
        """Allocate and load the weights of one group."""
        sizes = [int(np.prod(shape)) for shape, _, _ in specs]
        weights = []
        for spec, at in zip(specs, weight_homes(sizes, self._cuts), strict=True):
            weights.append(_load(spec, self.homes[at], policy))
        return weights


def _load(spec: Spec, home: Any, policy: Policy) -> TorchTensor:
    shape, dtype, file = spec
    is_matrix = len(shape) >= 2
    pin = policy.pin_weight if is_matrix else True
    if is_matrix and policy.compress_weight:
        weight = home.compressed_device.allocate(
            shape, dtype, policy.comp_weight_config, pin_memory=pin
        )
        parts = weight.data[:2]
    else:
        weight = home.allocate(shape, dtype, pin_memory=pin)
        parts = (weight,)
    if DUMMY_WEIGHT not in file:
        with part_of_load(READING, math.prod(shape) * np.dtype(dtype).itemsize):
            weight.load_from_np_file(file)
        return weight
    for part in parts:
        part.load_from_np(np.ones(part.shape, torch_dtype_to_np_dtype[part.dtype]))
    return weight


class Barrier(Protocol):
    """Waits for copies between host and accelerator."""

    def synchronize(self) -> None: ...


class TieredOptLM(OptLM):  # type: ignore[misc]
    """FlexGen's model on our devices.

    Parameters
    ----------
    config, env, policy
        As FlexGen's.
    folder
        The weight folder itself (FlexGen takes its parent and may download into it).
    recorder
        Gets every copy and computation with its phase and step.
    copies
        Waits for copies between host and accelerator.
    loaded
        Called after every layer with the number loaded and the number of layers.
    """

    def __init__(
        self,
        config: OptConfig,
        env: ExecutionEnv,
        folder: Path,
        policy: Policy,
        *,
        recorder: Recorder,
        copies: Barrier,
        loaded: LoadProgress | None = None,
    ) -> None:
        self._folder = folder
        self._recorder = recorder
        self._copies = copies
        self._loaded = loaded
        self.weight_home: list[ValueHolder] = []
        self.token_begins: Callable[[int], None] | None = None
        """Called when the loop turns to a token, before anything of it is computed."""
        super().__init__(config, env, str(folder.parent), policy)

    def init_weight(self, j: int) -> None:
        """Load one layer from the folder, which was checked before."""
        with self._kinds("weights"):
            self.layers[j].init_weight(self.weight_home[j], os.fspath(self._folder))
        if self._loaded is not None:
            self._loaded(j + 1, self.num_layers)

    def _kinds(self, kind: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.env.cpu.as_kind(kind)
        return context

    def load_weight(self, i: int, j: int, k: int, overlap: bool = True) -> None:
        self._phase("load_weight", super().load_weight, i, j, k, overlap)

    def load_cache(self, i: int, j: int, k: int, overlap: bool = True) -> None:
        self._phase("load_cache", super().load_cache, i, j, k, overlap)

    def store_cache(self, i: int, j: int, k: int, overlap: bool = True) -> None:
        self._phase("store_cache", super().store_cache, i, j, k, overlap)

    def _phase(
        self, queue: Queue, copy: Callable[..., None], i: int, j: int, k: int, overlap: bool
    ) -> None:
        """Without overlap FlexGen has no barrier, and would use what disk threads still copy."""
        if not overlap:
            self.sync()
        with self._recorder.on(queue):
            copy(i, j, k, overlap)
        if not overlap:
            self.sync()

    def load_hidden(self, i: int, j: int, k: int) -> None:
        with self._recorder.on("hidden"):
            super().load_hidden(i, j, k)

    def store_hidden(self, i: int, j: int, k: int) -> None:
        with self._recorder.on("hidden"):
            super().store_hidden(i, j, k)

    def sync(self) -> None:
        """FlexGen's barrier: every copy is done, and its errors are raised here."""
        self.env.disk.synchronize()
        self._copies.synchronize()
        self._recorder.barrier()

    def update_attention_mask(self, i: int, k: int) -> None:
        if k == 0:
            self._recorder.begin(i)
            if self.token_begins is not None:
                self.token_begins(i)
        super().update_attention_mask(i, k)

    def delete_cache(self, j: int, k: int) -> None:
        """Give the cache of one layer and batch back, files of disk segments included."""
        for tensor in self.cache_home[j][k].pop() or ():
            delete_tensor(tensor)

    def kv_tensors(self) -> Iterator[TorchTensor]:
        """Every piece of the KV cache that is alive, split ones piece by piece."""
        for layer in self.cache_home:
            for holder in layer:
                for tensor in holder.val or ():
                    yield from _pieces(tensor)

    def weight_tensors(self) -> Iterator[TorchTensor]:
        """Every weight, split and compressed ones piece by piece."""
        for holder in self.weight_home:
            yield from _kept(holder)

    def close(self) -> None:
        """Give all weights, caches and intermediate tensors back; calling again does nothing."""
        holders = [*self.weight_home, *self.weight_read_buf, *self.attention_mask]
        for table in (self.cache_home, self.cache_read_buf, self.cache_write_buf):
            holders += [holder for row in table for holder in row]
        for step in getattr(self, "hidden", ()):
            holders += [holder for row in step for holder in row]
        for holder in holders:
            for tensor in _tensors_in(holder.pop()):
                delete_tensor(tensor)
        self.env.cpu.del_attention_compute_workspace()
        self.env.cpu.forget_activations()

    def __del__(self) -> None:
        """FlexGen deletes weights here, which fails when loading them did; close() does it."""


def delete_tensor(tensor: TorchTensor) -> None:
    """Give a tensor back with all its parts.

    FlexGen's ``delete`` forgets the files of split and of compressed tensors.
    """
    if tensor.device is None:
        return
    for part in _parts(tensor):
        delete_tensor(part)
    tensor.delete()


def _parts(tensor: TorchTensor) -> list[TorchTensor]:
    kind = tensor.device.device_type
    if kind == DeviceType.MIXED:
        return [part for part in tensor.data[0] if part is not None]
    if kind == DeviceType.COMPRESSED:
        return list(tensor.data[:2])
    return []


def _pieces(tensor: TorchTensor) -> Iterator[TorchTensor]:
    parts = _parts(tensor)
    if not parts:
        yield tensor
    for part in parts:
        yield from _pieces(part)


def _kept(value: Any) -> Iterator[TorchTensor]:
    """Pieces of the tensors in what FlexGen keeps in a holder, which keeps them."""
    if isinstance(value, TorchTensor):
        yield from _pieces(value)
    elif isinstance(value, ValueHolder):
        yield from _kept(value.val)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _kept(each)


def _tensors_in(value: Any) -> Iterable[TorchTensor]:
    """Tensors in what FlexGen keeps in a holder: nested tuples, lists and holders."""
    if isinstance(value, TorchTensor):
        yield value
    elif isinstance(value, ValueHolder):
        yield from _tensors_in(value.pop())
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)


__getattr__ = old_names(__name__)
