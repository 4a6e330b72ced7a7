"""Memory that the layers of a cache have at first: one allocation for all where it is small.

Caches whose policy stripes are left out: there each tensor begins a stripe of its own.

An allocation takes as long as a small layer takes to compute, so a short prompt of a small model
would spend much of its time on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from cxl_offload.memory import Interleave, Weighted

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.room import KvMemory

Wanted = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""

_MOST_SHARED = 16 << 20
"""Bytes of an allocation that layers share. It stays until all of them have grown out of it."""


class FirstRooms:
    """Gives layers of one cache that want the same their first keys and values.

    Parameters
    ----------
    memory
        Where the allocation comes from.
    layers
        How many will ask.
    """

    def __init__(self, memory: KvMemory, layers: int) -> None:
        self._memory = memory
        self._left = layers
        self._block: torch.Tensor | None = None
        self._taken = 0

    def pair(self, keys: Wanted, values: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the next layer, uninitialised, with their pages in place.

        Raises
        ------
        MemoryError
            A node has no room.
        """
        dtype, at_values = keys[1], math.prod(keys[0])
        count = at_values + math.prod(values[0])
        shared = self._block_for(count, dtype) if values[1] is dtype else None
        self._left -= 1
        if shared is None:
            return self._memory.empty(*keys), self._memory.empty(*values)
        begin, self._taken = self._taken, self._taken + count
        if self._left <= 0:
            self._block = None  # the layers hold it
        with torch.inference_mode(False):  # views that keep the block, as long as one is there
            return _at(shared, begin, keys[0]), _at(shared, begin + at_values, values[0])

    def _block_for(self, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A shared block with so many numbers left; None: this layer has memory of its own."""
        if self._block is None:
            total = count * self._left
            most = _MOST_SHARED // dtype.itemsize
            if self._left < 2 or not 0 < total <= most or self._stripes():
                return None
            self._block = self._memory.empty((total,), dtype)
            self._taken = 0
        fits = self._taken + count * self._left <= self._block.numel()
        return self._block if fits and self._block.dtype is dtype else None

    def _stripes(self) -> bool:
        """Whether what one tensor is decides where its pages are, as plans count them."""
        return isinstance(self._memory.store.parts["kv"][0].policy, Interleave | Weighted)


def _at(block: torch.Tensor, begin: int, shape: tuple[int, ...]) -> torch.Tensor:
    return block.narrow(0, begin, math.prod(shape)).view(shape)


def share_first_rooms(layers: Iterable[Any], memory: KvMemory) -> None:
    """Growing layers of a cache that have nothing yet will share memory with those of their kind.

    Layers of one window want the same, since a model's heads are alike.
    """
    kinds: dict[tuple[type, int], list[Any]] = {}
    for layer in layers:
        if not layer.is_initialized:
            window = int(getattr(layer, "sliding_window", 0) or 0)
            kinds.setdefault((type(layer), window), []).append(layer)
    for alike in kinds.values():
        rooms = FirstRooms(memory, len(alike))
        for layer in alike:
            layer.first_rooms = rooms
