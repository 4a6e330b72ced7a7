"""Sequences of a cache in another order, as beams ask for it, where they lie."""

from __future__ import annotations

import torch

from cxl_offload.tensor_bytes import check_whole


def gather_rows(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """``tensor[:] = tensor[rows]``, with a copy of one head at a time and only of what changes.

    Parameters
    ----------
    tensor
        ``(batch, heads, positions, dim)``.
    rows
        ``(batch,)``, which sequence each is to be.
    """
    changed = (rows != torch.arange(tensor.shape[0])).nonzero().flatten()
    if changed.numel() == 0:
        return
    to, taken = changed.to(tensor.device), rows[changed].to(tensor.device)
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch does not index numbers of these types
    check_whole(tensor)  # what is lost would come to lie elsewhere, and nobody would know
    for head in range(tensor.shape[1]):
        part = tensor[:, head]
        part.index_copy_(0, to, part.index_select(0, taken))
