"""Times attention in place over every type that plans may keep keys and values in.

A smaller type has fewer bytes to read and more to convert, and heads that share keys have more
arithmetic a byte: which of both takes the time is the processor's to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cxl_offload.ops.attention import decode_attention
from cxl_offload.ops.int4_cache import Int4Cache
from cxl_offload.plan.kv_types import CODES, GROUP, KV_TYPES
from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import Clock
from cxl_offload.profile.operators.model import CacheTypePoint

_DIM = 128
"""Of a head; whole groups of codes."""

_GROUPED = 8
"""Heads of queries to one of keys, as large models have."""

_SHAPE = (4, 8, 1024)
"""Sequences, heads of keys, positions."""

_TURNS = 3
_OPERATIONS = 4
"""Of a number of a query and a position: a product and a sum, with the key and with the value."""

Half = torch.Tensor | Int4Cache


@dataclass(frozen=True, slots=True)
class _Caches:
    """As many caches of one type as are larger than the processor's."""

    kv_dtype: str
    group: int
    cache_bytes: int
    pairs: list[tuple[Half, Half]]

    def seconds(self, clock: Clock) -> list[float]:
        """Of attention over each."""
        rows, heads, _ = _SHAPE
        q = torch.full((rows, heads * self.group, _DIM), 0.5, dtype=torch.bfloat16)
        taken = []
        for keys, values in self.pairs:
            began = clock()
            decode_attention(q, keys, values)
            taken.append(max(clock() - began, 1e-9))
        return taken

    def point(self, taken: list[float]) -> CacheTypePoint:
        """What they took."""
        rows, heads, positions = _SHAPE
        operations = _OPERATIONS * rows * heads * self.group * positions * _DIM
        return CacheTypePoint(
            self.kv_dtype, self.group, self.cache_bytes, operations, estimate(taken)
        )


def measure_cache_types(clock: Clock, ring_bytes: int) -> tuple[CacheTypePoint, ...]:
    """A point for every type, and one for heads that share keys; all in turns.

    Parameters
    ----------
    clock
        Seconds since any moment.
    ring_bytes
        More than the processor's caches hold.
    """
    made = [_caches("", 1, ring_bytes), _caches("", _GROUPED, ring_bytes)]
    made += [_caches(name, 1, ring_bytes) for name in KV_TYPES]
    taken: list[list[float]] = [[] for _ in made]
    for turn in range(_TURNS + 1):
        for at, caches in enumerate(made):
            seconds = caches.seconds(clock)
            if turn:  # before, nothing was ever used
                taken[at] += seconds
    return tuple(caches.point(each) for caches, each in zip(made, taken, strict=True))


def _caches(kv_dtype: str, group: int, ring_bytes: int) -> _Caches:
    make = _maker(kv_dtype)
    row = KV_TYPES[kv_dtype].row_bytes(_DIM) if kv_dtype else 2 * _DIM
    rows, heads, positions = _SHAPE
    nbytes = 2 * rows * heads * positions * row
    count = max(2, -(-ring_bytes // nbytes))
    return _Caches(kv_dtype, group, nbytes, [(make(), make()) for _ in range(count)])


def _maker(kv_dtype: str) -> Callable[[], Half]:
    if kv_dtype == CODES:
        return _codes
    dtype = getattr(torch, kv_dtype) if kv_dtype else torch.bfloat16
    return lambda: torch.full((*_SHAPE, _DIM), 0.5, dtype=torch.float32).to(dtype)


def _codes() -> Int4Cache:
    scales = torch.full((*_SHAPE, _DIM // GROUP, 2), 0.01, dtype=torch.float16)
    return Int4Cache(torch.full((*_SHAPE, _DIM // 2), 0x57, dtype=torch.uint8), scales, "low, step")
