"""Decode attention as an operator of torch: ``torch.ops.cxl_offload.decode_attention``.

Importing this module registers it. Models that call it compile without a break in their graph
(``torch.compile(fullgraph=True)``); there is no derivative.
"""

from __future__ import annotations

from typing import cast

import torch

from cxl_offload.ops import attention
from cxl_offload.ops.int4_cache import Form, Int4Cache
from cxl_offload.ops.view import check_devices


def _cache(
    numbers: torch.Tensor, scales: torch.Tensor | None, form: str, name: str
) -> torch.Tensor | Int4Cache:
    if (numbers.dtype is torch.uint8) != (scales is not None):
        raise ValueError(
            f"{name} of {numbers.dtype}: 4-bit codes (uint8), and only they, take scales of groups"
        )
    if scales is None:
        return numbers
    return Int4Cache(numbers, scales, cast("Form", form))


# Many parameters: torch reads an operator's schema off them.
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
    k_groups: torch.Tensor | None = None,
    v_groups: torch.Tensor | None = None,
    form: str = "low, step",
    soft_cap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """As :func:`cxl_offload.ops.attention.decode_attention`, on all allowed CPUs.

    Parameters
    ----------
    k_groups, v_groups, form
        Where ``k`` and ``v`` are 4-bit codes: the ``scales`` and the ``form`` of each
        :class:`~cxl_offload.ops.int4_cache.Int4Cache`, whose fields an operator of torch takes
        one by one.

    Raises
    ------
    ValueError
        Codes without scales or scales without codes, or no such form; and as the function.
    """
    return attention.decode_attention(
        q,
        _cache(k, k_groups, form, "k"),
        _cache(v, v_groups, form, "v"),
        lengths=lengths,
        scale=scale,
        block_table=block_table,
        mask=mask,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        soft_cap=soft_cap,
        bias=bias,
        sinks=sinks,
        causal=causal,
    )


@decode_attention.register_fake
def _shape_of(q: torch.Tensor, *given: object, **named: object) -> torch.Tensor:
    tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
    check_devices("decode_attention", q, *tensors)
    return torch.empty_like(q, memory_format=torch.contiguous_format)
