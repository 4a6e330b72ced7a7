"""Weights that lie in a mapped file are read from the file to their place, by several threads."""

from __future__ import annotations

import torch

from cxl_offload.memory.copies import any_copies
from cxl_offload.memory.whole import copying
from cxl_offload.tensor import copy_whole
from cxl_offload.tensor_bytes import host_ranges
from cxl_offload.transfer.file_reads import read_file_part
from cxl_offload.transfer.mapped_files import file_part_at

LEAST_BYTES = 1 << 20
"""Of a smaller weight, finding its file costs more than reading it gains."""


def filled(target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``target`` with the elements of ``weight``.

    Parameters
    ----------
    target
        A contiguous tensor in a tier, of the shape and dtype of ``weight``.
    weight
        A plain tensor on the CPU. Where it lies in a file that is mapped and nobody wrote to it,
        its bytes are read from the file, and not through the mapping.

    Raises
    ------
    MemoryLostError
        As :func:`cxl_offload.tensor.copy_whole`.
    OSError
        The file cannot be read, or became shorter.
    """
    same = target.dtype == weight.dtype and weight.is_contiguous() and target.is_contiguous()
    if not same or weight.nbytes < LEAST_BYTES or any_copies():
        return copy_whole(target, weight)
    part = file_part_at(weight.data_ptr(), weight.nbytes)
    if part is None:
        return copy_whole(target, weight)
    with copying(source=list, target=lambda: host_ranges([target])):
        read_file_part(part, target=target.data_ptr())
    return target
