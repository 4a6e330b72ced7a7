"""How many bytes must be read before the first of them is found in no cache any more."""

from __future__ import annotations

import functools
import statistics
import time

import torch
from torch.nn import functional

from cxl_offload.topology import discover

_LEAST_BYTES = 160 << 20
"""Many times what a core has of most last-level caches."""

_OF_CACHES = 2
"""Times the last-level caches: beyond, nothing is found again, however they choose what to keep."""

_SLOWER = 1.1
"""Times as long as over half the bytes: less is noise."""

_WIDTH = 1024
_TURNS = 3


@functools.cache
def ring_bytes() -> int:
    """The least power of two of 160 MiB of matrices over which products are as slow as over twice
    as many.

    The size of a cache does not say it: other programs, and other guests of the machine, have a
    part of it. At most twice the caches, and an eighth of the free memory.
    """
    nodes = discover().nodes
    most = min(
        _OF_CACHES * sum(node.llc_bytes or 0 for node in nodes),
        sum(node.free_bytes or 0 for node in nodes) // 8,
    )
    ring, matrices = _LEAST_BYTES, list[torch.Tensor]()
    before = 0.0
    while ring < most:
        matrices += _matrices(ring - 2 * _WIDTH**2 * len(matrices))
        before = before or _seconds(matrices)
        matrices += _matrices(ring)
        twice = _seconds(matrices)
        if twice < _SLOWER * before:
            break
        ring, before = 2 * ring, twice
    return ring


def _matrices(nbytes: int) -> list[torch.Tensor]:
    shape = (_WIDTH, _WIDTH)
    count = nbytes // (2 * _WIDTH**2)
    return [torch.full(shape, 0.01, dtype=torch.bfloat16) for _ in range(count)]


def _seconds(matrices: list[torch.Tensor]) -> float:
    """Of one, where all are read in turns; other programs only lengthen a turn."""
    x = torch.full((1, _WIDTH), 0.5, dtype=torch.bfloat16)
    turns = []
    for _ in range(_TURNS):
        taken = []
        for matrix in matrices:
            began = time.perf_counter()
            functional.linear(x, matrix)
            taken.append(time.perf_counter() - began)
        turns.append(statistics.median(taken))
    return min(turns)
