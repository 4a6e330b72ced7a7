"""Linear layers as an operator of torch: ``torch.ops.cxl_offload.linear``.

Importing this module registers it. Models that call it compile without a break in their graph
(``torch.compile(fullgraph=True)``); there is no derivative.
"""

from __future__ import annotations

from typing import cast

import torch

from cxl_offload.ops import linear as layers
from cxl_offload.ops.int4_weight import GroupForm, Int4Weight
from cxl_offload.ops.view import check_devices


@torch.library.custom_op("cxl_offload::linear", mutates_args=(), device_types="cpu")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    form: str = "low, step",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As :func:`cxl_offload.ops.linear.linear`, on all allowed CPUs.

    Parameters
    ----------
    groups, form
        Where ``weight`` is 4-bit codes: the fields of
        :class:`~cxl_offload.ops.int4_weight.Int4Weight`, which an operator of torch takes one by
        one.

    Raises
    ------
    ValueError
        Codes without groups or groups without codes, or no such form; and as the function.
    """
    if (weight.dtype is torch.uint8) != (groups is not None):
        raise ValueError(
            f"weight of {weight.dtype}: 4-bit codes (uint8), and only they, take groups"
        )
    given = weight if groups is None else Int4Weight(weight, groups, cast("GroupForm", form))
    return layers.linear(x, given, bias, scale=scale, out_dtype=out_dtype)


@linear.register_fake
def _shape_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    form: str = "low, step",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    check_devices("linear", x, weight, bias, scale, groups)
    width = weight.shape[1] * (1 if groups is None else 2)
    fits = x.shape[-1] == width
    torch._check(fits, lambda: f"linear: x of {tuple(x.shape)} for weights of {width} inputs")  # type: ignore[no-untyped-call]
    dtype = x.dtype if out_dtype is None else out_dtype
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)
