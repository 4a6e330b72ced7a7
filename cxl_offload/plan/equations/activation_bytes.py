"""GPU memory that activations take while they are copied to a tier and back.

The planner counts on what ``ops.activations`` does; both have it from here.
"""

from __future__ import annotations

ACTIVATIONS = "activations"
"""The kind of host tensor that checkpoints of activations are, where they leave the GPU."""

LEAST_BYTES = 256 << 10
"""Tensors of fewer bytes stay where they are: a copy over PCIe takes some 10 us however small."""

LEAVING_BYTES = 256 << 20
"""GPU memory that copies under way may hold back; at 25 GB/s some 10 ms of copying."""

COPIES_AHEAD = 2
"""Copies that are on their way back ahead of the one that the backward needs, on a GPU."""


def held_on_gpu(nbytes: int, parts: int) -> int:
    """Bytes of activations in ``parts`` equal tensors that are on the GPU at most at a time.

    Those that wait for their copy and the one that exceeds them; or those that came back ahead; or
    all, where they are too small to leave.
    """
    if nbytes < parts * LEAST_BYTES:
        return nbytes
    one = -(-nbytes // parts)
    return min(nbytes, LEAVING_BYTES + (COPIES_AHEAD + 1) * one)
