"""Times products of many rows as transformers computes them on CPUs: torch's own, in bfloat16.

Processors multiply bfloat16 up to ten times as fast as float16, which FlexGen computes in, and many
rows faster than few. Those of few rows are timed in a layer's sequence
(:mod:`cxl_offload.profile.operators.gated_layer`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import Clock
from cxl_offload.profile.operators.gated_layer import WIDTHS, inner_of
from cxl_offload.profile.operators.model import ProductPoint

ROWS = (256, 1024)
_MATRICES = 4
"""Reading a matrix takes little of what so many rows take: few of them say it."""


def measure_products(clock: Clock) -> tuple[ProductPoint, ...]:
    """A point for every size of matrix and number of rows.

    Parameters
    ----------
    clock
        Seconds since any moment.
    """
    made = []
    for width in WIDTHS:
        for outputs in (width, inner_of(width)):
            matrices = [
                torch.full((outputs, width), 0.01, dtype=torch.bfloat16) for _ in range(_MATRICES)
            ]
            for rows in ROWS:
                x = torch.full((rows, width), 0.5, dtype=torch.bfloat16)
                functional.linear(x, matrices[-1])
                taken = []
                for matrix in matrices:
                    began = clock()
                    functional.linear(x, matrix)
                    taken.append(max(clock() - began, 1e-9))
                made.append(ProductPoint(rows, 2 * matrices[0].numel(), estimate(taken)))
    return tuple(made)
