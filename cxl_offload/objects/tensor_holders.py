"""The tensors of this process by owner, and the rest of its memory: ``memory_report()``."""

from __future__ import annotations

import bisect
import gc
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from cxl_offload.memory import Session, current_session
from cxl_offload.memory.placement import NOT_FAULTED_IN
from cxl_offload.objects.held_memory import (
    HeldTensor,
    MemoryHolder,
    MemoryReport,
    add_nodes,
    by_size,
    checkpoints_in_use,
    holder,
    owner_of,
)
from cxl_offload.objects.mapped_ranges import MappedRange, read_mapped_ranges
from cxl_offload.units import MIB, format_bytes

_STRAY_BYTES = MIB  # smaller ones are no loss


@dataclass(frozen=True, slots=True)
class _Named:
    owner: str
    name: str
    tensor: torch.Tensor


def memory_report(*, session: Session | None = None) -> MemoryReport:
    """Who holds the host memory of this process: every resident byte by owner and node.

    Parameters
    ----------
    session
        Whose tensors count as placed; None means the current one.

    Returns
    -------
    MemoryReport
        Storages of CPU tensors by owner: ``parameters``, ``buffers``, ``gradients``, ``optimizer
        states``, ``keys and values`` (transformers' caches), ``other tensors``; then what the
        mappings tell of the rest. ``strays`` names tensors of at least 1 MiB that lie outside of
        the session while others of the same module or optimizer lie in it (what ``.float()``,
        ``.to()`` or an assignment leaves), and those that are not pinned beside pinned ones.

    Notes
    -----
    Tensors are found by Python's garbage collector: those that only C++ holds, such as what
    autograd saved or what an allocator keeps for later, count as other memory. A storage that two
    owners share counts once, for the first of the list above. Nodes are those of the kernel, also
    where ``session`` is simulated. It takes a second or so for a large model and stops nothing.
    """
    placed_by = session or current_session()
    claims = _Claims()
    tensors = []
    for named, address, nbytes in _without_overlaps(_storages(_named_tensors())):
        nodes = claims.take(address, address + nbytes)
        block = placed_by.find(address)
        pinned = _is_pinned(named.tensor) if block is None else block.pinned
        placed = block is not None
        tensors.append(HeldTensor(named.owner, named.name, nbytes, nodes, placed, pinned))
    tensors.sort(key=lambda tensor: (-tensor.nbytes, tensor.name))
    holders = (*_holders(tensors), *claims.unclaimed())
    return MemoryReport(
        os.getpid(),
        time.time(),
        by_size(each for each in holders if each.resident_bytes or each.swapped_bytes),
        tuple(tensors),
        tuple(_strays(tensors)),
        checkpoints_in_use(claims.ranges, Path("/proc/self")),
        unused_pool_bytes=placed_by.stats().cached_bytes.current,
        simulated_session=placed_by.is_simulated,
    )


class _Claims:
    """The mappings of this process, and what of each has an owner already."""

    def __init__(self) -> None:
        self.ranges = read_mapped_ranges()
        self._begins = [mapped.begin for mapped in self.ranges]
        self._taken: dict[int, dict[int, int]] = {}
        self._kernel = Session.linux()

    def take(self, begin: int, end: int) -> dict[int, int]:
        """Node to resident bytes of a range of addresses. Later calls do not count it again."""
        total: dict[int, int] = {}
        for at in range(max(0, bisect.bisect_right(self._begins, begin) - 1), len(self.ranges)):
            mapped = self.ranges[at]
            if mapped.begin >= end:
                break
            first, last = max(begin, mapped.begin), min(end, mapped.end)
            if first < last:
                nodes = self._kernel.bytes_per_node(first, last - first)
                nodes.pop(NOT_FAULTED_IN, None)
                self._taken[at] = add_nodes((self._taken.get(at, {}), nodes))
                total = add_nodes((total, nodes))
        return total

    def unclaimed(self) -> Iterator[MemoryHolder]:
        """The rest, by the names of mappings."""
        by_owner: dict[str, list[MappedRange]] = {}
        for at, mapped in enumerate(self.ranges):
            taken = self._taken.get(at, {})
            nodes = {node: max(0, n - taken.get(node, 0)) for node, n in mapped.nodes.items()}
            gone = sum(taken.values())
            rest = replace(
                mapped,
                resident_bytes=max(0, mapped.resident_bytes - gone),
                huge_bytes=max(0, mapped.huge_bytes - gone),
                locked_bytes=max(0, mapped.locked_bytes - gone),
                nodes=nodes,
            )
            by_owner.setdefault(owner_of(mapped), []).append(rest)
        for owner, parts in by_owner.items():
            yield holder(owner, parts)


def _holders(tensors: Iterable[HeldTensor]) -> Iterator[MemoryHolder]:
    by_owner: dict[str, list[HeldTensor]] = {}
    for tensor in tensors:
        by_owner.setdefault(tensor.owner, []).append(tensor)
    for owner, held in by_owner.items():
        nodes = add_nodes(tensor.nodes for tensor in held)
        yield MemoryHolder(owner, sum(nodes.values()), nodes)


def _is_pinned(tensor: torch.Tensor) -> bool:
    is_used = cast("Any", torch.cuda).is_initialized()  # asking would make a context
    return bool(is_used) and tensor.is_pinned()


def _storages(named: Iterable[_Named]) -> Iterator[tuple[_Named, int, int]]:
    """Those with memory of their own in this process, with address and bytes; a storage once."""
    seen: set[int] = set()
    for each in named:
        tensor = each.tensor
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            continue
        try:
            storage = tensor.untyped_storage()
            address, nbytes = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):
            continue  # fake or functional: no memory
        if address and nbytes and address not in seen:
            seen.add(address)
            yield each, address, nbytes


def _without_overlaps(
    storages: Iterable[tuple[_Named, int, int]],
) -> Iterator[tuple[_Named, int, int]]:
    """Sorts storages by address. Where some share memory (numpy, from_blob), counts it once."""
    reached = 0
    for named, address, nbytes in sorted(storages, key=lambda each: (each[1], -each[2])):
        begin, end = max(address, reached), address + nbytes
        if begin < end:
            yield named, begin, end - begin
            reached = end


def _named_tensors() -> Iterator[_Named]:
    """All tensors that Python knows of, those of modules and optimizers first."""
    tracked = gc.get_objects()
    modules = [each for each in tracked if issubclass(type(each), nn.Module)]
    optimizers = [each for each in tracked if issubclass(type(each), torch.optim.Optimizer)]
    names = dict(_names_of_modules(modules))
    for module in modules:
        for kind, held in (("parameters", module._parameters), ("buffers", module._buffers)):
            for key, tensor in held.items():
                if tensor is not None:
                    yield _Named(kind, f"{names[id(module)]}.{key}", tensor)
                    if tensor.grad is not None:
                        yield _Named("gradients", f"{names[id(module)]}.{key}.grad", tensor.grad)
    for optimizer in optimizers:
        for at, state in enumerate(optimizer.state.values()):
            for key, tensor in state.items():
                if isinstance(tensor, torch.Tensor):
                    name = f"{type(optimizer).__name__}.state[{at}].{key}"
                    yield _Named("optimizer states", name, tensor)
    for each in tracked:
        if any(base.__name__ == "CacheLayerMixin" for base in type(each).__mro__):
            for key in ("keys", "values"):
                tensor = getattr(each, key, None)
                if isinstance(tensor, torch.Tensor):
                    yield _Named("keys and values", f"{type(each).__name__}.{key}", tensor)
    for each in tracked:
        if issubclass(type(each), torch.Tensor):
            yield _Named("other tensors", f"{tuple(each.shape)} {each.dtype}", each)


def _names_of_modules(modules: Iterable[nn.Module]) -> Iterator[tuple[int, str]]:
    modules = list(modules)
    inner = {id(child) for module in modules for child in module._modules.values()}
    for module in modules:
        if id(module) not in inner:
            for name, each in module.named_modules(prefix=type(module).__name__):
                yield id(each), name


def _strays(tensors: Iterable[HeldTensor]) -> Iterator[str]:
    """Tensors outside of the session, or not pinned, beside others of the same owner and root."""
    groups: dict[tuple[str, str], list[HeldTensor]] = {}
    for tensor in tensors:
        if tensor.owner != "other tensors":
            groups.setdefault((tensor.owner, tensor.name.split(".", 1)[0]), []).append(tensor)
    for (owner, root), held in groups.items():
        for what, has in (("placed", "placed"), ("pinned", "pinned")):
            kept = sum(getattr(tensor, has) for tensor in held)
            for tensor in held:
                if kept and not getattr(tensor, has) and tensor.nbytes >= _STRAY_BYTES:
                    yield (
                        f"{tensor.name} ({format_bytes(tensor.nbytes)}) is not {what}, "
                        f"while {kept} of {len(held)} {owner} of {root} are"
                    )
