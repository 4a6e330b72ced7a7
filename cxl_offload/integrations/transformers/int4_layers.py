"""Linear layers over 4-bit codes in host memory, by the package's kernel."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from cxl_offload.ops.int4_weight import Int4Weight
from cxl_offload.ops.measured_linear import MANY_ROWS, TORCH, MeasuredLinear, kernel_ways

_AT_ONCE = 1 << 22
"""Weights that are numbers at a time, so that a prompt needs no second copy of a layer."""


def row_bytes(width: int, group: int) -> int:
    """Bytes of a row: two codes a byte, then two float16 a group."""
    return width // 2 + width // group * 4


def packed_rows(weight: Int4Weight) -> torch.Tensor:
    """``(outputs, row_bytes)``, uint8: each row's codes and groups together, a new tensor."""
    groups = weight.groups.flatten(1).contiguous().view(torch.uint8)
    return torch.cat((weight.codes, groups), 1)


def int4_of(packed: torch.Tensor, width: int) -> Int4Weight:
    """Views of rows that :func:`packed_rows` made."""
    codes = width // 2
    groups = packed[:, codes:].view(torch.float16)
    return Int4Weight(packed[:, :codes], groups.unflatten(1, (-1, 2)), "zero, step")  # type: ignore[no-untyped-call]


@functools.cache
def _measured(width: int, group: int, *, many: bool) -> MeasuredLinear:
    """What all layers of a width and a group ask which way is faster; torch's only of many rows."""
    view = functools.partial(int4_of, width=width)
    by_torch = {TORCH: functools.partial(_by_torch, width=width)} if many else {}
    return MeasuredLinear(ways={**kernel_ways(lambda: None, view), **by_torch})


def _by_torch(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, width: int
) -> torch.Tensor:
    """Over numbers, which are made of the codes for some outputs after the other."""
    step = max(1, _AT_ONCE // width)
    parts = [
        functional.linear(x, int4_of(packed[first : first + step], width).dequantized().to(x.dtype))
        for first in range(0, packed.shape[0], step)
    ]
    made = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return made if bias is None else made + bias


class Int4Linear(nn.Module):
    """``y = x w^T + bias`` with weights ``(code - zero) * step``.

    Up to :data:`~cxl_offload.ops.measured_linear.MANY_ROWS` rows are the kernel's, by vectors,
    tiles or integers, whichever the first calls of a shape show to be fastest. More, as of a
    prompt, are torch's over numbers where a part of the layer is faster so.

    Parameters
    ----------
    width, outputs
        As of ``nn.Linear``.
    group
        Weights of a row that share zero and step: a multiple of 32 that divides ``width``.
    bias
        Whether there is one.
    dtype
        Of the bias.

    Attributes
    ----------
    weight
        ``(outputs, row_bytes)``, uint8; see :func:`packed_rows`.
    """

    def __init__(
        self, width: int, outputs: int, group: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group = width, outputs, group
        packed = torch.empty(outputs, row_bytes(width, group), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def int4(self, first: int = 0, end: int | None = None) -> Int4Weight:
        """Views of the weights of some outputs."""
        return int4_of(self.weight.detach()[first:end], self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., width)`` to ``(..., outputs)``, in x's type."""
        wanted = torch.is_grad_enabled() and (
            x.requires_grad or (self.bias is not None and self.bias.requires_grad)
        )
        weight = self.weight.detach()
        if wanted or torch.compiler.is_compiling():
            return _by_torch(x, weight, self.bias, self.in_features)
        many = x.numel() > MANY_ROWS * self.in_features
        measured = _measured(self.in_features, self.group, many=many)
        return measured.by(measured.key(x, weight), x, weight, self.bias)

    def extra_repr(self) -> str:
        """As of ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int4"
