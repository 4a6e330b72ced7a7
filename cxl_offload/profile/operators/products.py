"""Times linear layers as transformers computes them on CPUs: torch's own, in bfloat16.

Processors multiply bfloat16 up to ten times as fast as float16, which FlexGen computes in, and many
rows faster than few.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import Clock
from cxl_offload.profile.operators.model import ProductPoint

ROWS = (1, 4, 16, 64, 256, 1024)

_SHAPES = {(1024, 1024): 40, (4096, 1024): 10, (4096, 4096): 4}
"""Matrices, and how many of them are together larger than the caches of a core, so that none is
found there again."""

_TURNS = 2
_FEW, _SOME = 64, 4
"""More rows than these take so long for a matrix that few matrices say it."""


def measure_products(clock: Clock) -> tuple[ProductPoint, ...]:
    """A point for every size and number of rows.

    Parameters
    ----------
    clock
        Seconds since any moment.
    """
    made = []
    for shape, count in _SHAPES.items():
        matrices = [torch.full(shape, 0.01, dtype=torch.bfloat16) for _ in range(count)]
        for rows in ROWS:
            x = torch.full((rows, shape[1]), 0.5, dtype=torch.bfloat16)
            functional.linear(x, matrices[-1])
            taken = []
            for matrix in matrices * _TURNS if rows <= _FEW else matrices[:_SOME]:
                began = clock()
                functional.linear(x, matrix)
                taken.append(max(clock() - began, 1e-9))
            made.append(ProductPoint(rows, 2 * matrices[0].numel(), estimate(taken)))
    return tuple(made)
