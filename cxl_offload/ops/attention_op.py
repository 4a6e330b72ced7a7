"""Decode attention as an operator of torch: ``torch.ops.cxl_offload.decode_attention``.

Importing this module registers it. Models that call it compile without a break in their graph
(``torch.compile(fullgraph=True)``); there is no derivative.
"""

from __future__ import annotations

import torch

from cxl_offload.ops import attention

__all__ = ["decode_attention"]


@torch.library.custom_op("cxl_offload::decode_attention", mutates_args=(), device_types="cpu")
def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    block_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`cxl_offload.ops.attention.decode_attention`, on all allowed CPUs."""
    return attention.decode_attention(
        q,
        k,
        v,
        lengths=lengths,
        scale=scale,
        block_table=block_table,
        mask=mask,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
    )


@decode_attention.register_fake
def _shape_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None = None,
    scale: float | None = None,
    block_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
