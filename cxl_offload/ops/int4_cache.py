"""KV caches of 4-bit codes in groups, as FlexGen and our packing on GPUs write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from cxl_offload import _C
from cxl_offload.ops.view import tensor_view
from cxl_offload.plan.kv_types import GROUP

Form = Literal["low, step", "rate, low"]
"""What the two scales of a group are: see :class:`Int4Cache`."""

_FORMS = get_args(Form)


@dataclass(frozen=True, slots=True)
class Int4Cache:
    """K or V as codes; nothing is copied or owned.

    Attributes
    ----------
    codes
        ``(batch, kv_heads, seq, row_bytes)``, uint8, two codes a byte, the first in the upper half;
        of any strides but the last. With a block table ``(blocks, block_size, kv_heads,
        row_bytes)``. A row is whole groups of 64, 128, ... codes; those beyond the head's numbers
        are not used.
    scales
        The same first three dimensions, then ``(groups, 2)``, contiguous; float16.
    form
        What the two scales of a group are, and a code is worth: "low, step": ``code * step + low``
        (our packing); "rate, low": ``code / rate + low`` (FlexGen's).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    form: Form

    def heads_before_positions(self) -> Int4Cache:
        """The same cache with its second and third dimension exchanged."""
        return Int4Cache(self.codes.transpose(1, 2), self.scales.transpose(1, 2), self.form)

    def views(self, name: str) -> tuple[_C.TensorView, _C.TensorView]:
        """Views of codes and scales for a kernel.

        Raises
        ------
        ValueError, TypeError
            No such form, or a tensor that is not of the right type, or not on the CPU.
        """
        if self.form not in _FORMS:
            raise ValueError(f"form {self.form!r}; it is one of {', '.join(map(repr, _FORMS))}")
        return (
            tensor_view(self.codes, f"{name}.codes", dtypes=(torch.uint8,), strided=True),
            tensor_view(self.scales, f"{name}.scales", dtypes=(torch.float16,), strided=True),
        )


def int4_from_flexgen(codes: torch.Tensor, scales: torch.Tensor, batch: int) -> Int4Cache:
    """What FlexGen's ``--compress-cache`` keeps, as a cache of ``batch`` sequences; no copy.

    Parameters
    ----------
    codes
        ``(seq, batch * heads, row_bytes)``, uint8.
    scales
        ``(seq, batch * heads, groups, 2)``, float16.

    Raises
    ------
    ValueError
        Of other dimensions, or the second is no multiple of ``batch``.
    """
    if codes.dim() != 3 or scales.dim() != 4 or batch < 1 or codes.shape[1] % batch:
        raise ValueError(
            f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} are not (seq, {batch} * "
            f"heads, bytes) and (seq, {batch} * heads, groups, 2)"
        )
    apart, apart_scales = (_unflatten(part, (batch, -1)) for part in (codes, scales))
    return Int4Cache(apart.permute(1, 2, 0, 3), apart_scales.permute(1, 2, 0, 3, 4), "rate, low")


def int4_from_packed(
    blocks: torch.Tensor, *, block_size: int, kv_heads: int, dim: int, group: int = GROUP
) -> Int4Cache:
    """Blocks that :class:`cxl_offload.transfer.PackedFormat` "int4" packed; no copy.

    Parameters
    ----------
    blocks
        ``(blocks, packed_bytes)``, uint8: in each ``(block_size, kv_heads, dim)`` numbers in groups
        of ``group``, which divides ``dim``. Attend with a block table.

    Raises
    ------
    ValueError
        Groups that do not divide a head, or blocks of another size or type.
    """
    numbers = block_size * kv_heads * dim
    packed = numbers // 2 + numbers // max(group, 1) * 4
    if group < 1 or dim % group:
        raise ValueError(f"groups of {group} do not divide heads of {dim}; pack with one that does")
    fits = blocks.dim() == 2 and blocks.shape[1] == packed and blocks.is_contiguous()
    if not fits or blocks.dtype is not torch.uint8:
        raise ValueError(
            f"blocks {tuple(blocks.shape)} of {blocks.dtype} are not contiguous uint8 of {packed} "
            "bytes each"
        )
    codes = _unflatten(blocks[:, : numbers // 2], (block_size, kv_heads, dim // 2))
    scales = blocks[:, numbers // 2 :].view(torch.float16)
    shaped = _unflatten(scales, (block_size, kv_heads, dim // group, 2))
    return Int4Cache(codes, shaped, "low, step")


def _unflatten(tensor: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """A view with the second dimension cut into ``sizes``."""
    view: torch.Tensor = tensor.unflatten(1, sizes)  # type: ignore[no-untyped-call]
    return view
