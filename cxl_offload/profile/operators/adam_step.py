"""Times a step of this package's Adam, which bounds the optimizer of plans for training."""

from __future__ import annotations

import torch

from cxl_offload.ops.adam import adam_step
from cxl_offload.plan.equations.adam_bytes import (
    HOST_BYTES_PER_PARAM,
    OPTIMIZER_BYTES_PER_PARAM,
)
from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import Clock
from cxl_offload.profile.operators.model import AdamPoint

_STEPS = 6


def measure_adam(clock: Clock, ring_bytes: int) -> AdamPoint:
    """Steps over parameters, gradients and states of ``ring_bytes`` in all.

    Parameters
    ----------
    clock
        Seconds since any moment.
    ring_bytes
        More than the processor's caches hold.
    """
    count = ring_bytes // HOST_BYTES_PER_PARAM
    made = [torch.full((count,), 0.01) for _ in range(HOST_BYTES_PER_PARAM // 4)]
    taken = []
    for step in range(1, _STEPS + 2):
        began = clock()
        adam_step(*made, step=step, lr=1e-4)
        taken.append(max(clock() - began, 1e-9))
    return AdamPoint(count, OPTIMIZER_BYTES_PER_PARAM * count, estimate(taken[1:]))
