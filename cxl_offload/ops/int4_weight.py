"""Weights of 4-bit codes in groups, for :func:`cxl_offload.ops.linear.linear`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cxl_offload import _C
from cxl_offload.ops.view import tensor_view
from cxl_offload.plan.kv_types import GROUP

GroupForm = Literal["low, step", "rate, low", "zero, step"]
"""What the two numbers of a group are: see :class:`Int4Weight`."""

_FORMS = {
    "low, step": _C.GroupScales.low_step,
    "rate, low": _C.GroupScales.inverse_low,
    "zero, step": _C.GroupScales.zero_step,
}
_CODES_PER_WORD = 8
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of the codes of neighbouring outputs in a word of AWQ, in units of four bits."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Weights as codes; nothing is copied or owned.

    Attributes
    ----------
    codes
        ``(outputs, width / 2)``, uint8, two codes a byte, the first in the upper half. Rows are
        contiguous and any number of bytes apart.
    groups
        ``(outputs, width / group, 2)``, float16, the last two dimensions contiguous; a group is a
        multiple of 32 codes of a row.
    form
        What the two numbers of a group are, and a code is worth: "low, step": ``code * step +
        low``; "rate, low": ``code / rate + low``; "zero, step": ``(code - zero) * step``.
    """

    codes: torch.Tensor
    groups: torch.Tensor
    form: GroupForm

    def groups_view(self) -> tuple[_C.TensorView, _C.GroupScales]:
        """For the kernel.

        Raises
        ------
        ValueError, TypeError
            No such form, or groups that are not float16 on the CPU.
        """
        if self.form not in _FORMS:
            raise ValueError(f"form {self.form!r}; it is one of {', '.join(map(repr, _FORMS))}")
        view = tensor_view(self.groups, "groups", dtypes=(torch.float16,), strided=True)
        return view, _FORMS[self.form]

    def dequantized(self) -> torch.Tensor:
        """The weights as numbers: ``(outputs, width)``, float32, a new tensor."""
        codes = torch.stack((self.codes >> 4, self.codes & 15), dim=-1).flatten(1).float()
        first, second = self.groups.float().unbind(-1)
        grouped = codes.unflatten(1, (first.shape[1], -1))  # type: ignore[no-untyped-call]
        first, second = first.unsqueeze(-1), second.unsqueeze(-1)
        if self.form == "low, step":
            worth = grouped * second + first
        elif self.form == "rate, low":
            worth = grouped / first + second
        else:
            worth = (grouped - first) * second
        found: torch.Tensor = worth.flatten(1)
        return found


def int4_quantized(weight: torch.Tensor, group: int = GROUP) -> Int4Weight:
    """Weights rounded to 16 steps from the least to the greatest of each group.

    Parameters
    ----------
    weight
        ``(outputs, width)``, a float type.
    group
        Weights that share two numbers: a multiple of 32 that divides ``width``.

    Raises
    ------
    ValueError
        Groups that do not divide a row, weights of other than two dimensions or of no float type,
        or a group of finite ones whose least number or step is beyond float16.
    """
    if not weight.is_floating_point():
        raise ValueError(f"weights of {weight.dtype} to quantize: give a float type")
    if weight.dim() != 2 or group < 32 or group % 32 or weight.shape[1] % group:
        raise ValueError(
            f"groups of {group} in weights of shape {tuple(weight.shape)}: give (outputs, width) "
            "and a multiple of 32 that divides width"
        )
    grouped = weight.float().unflatten(1, (-1, group))  # type: ignore[no-untyped-call]
    low = grouped.amin(-1).half()
    step = ((grouped.amax(-1) - low.float()) / 15).half()
    beyond = grouped.isfinite().all(-1) & ~(low.isfinite() & step.isfinite())
    if beyond.any():
        worst = grouped[beyond]
        raise ValueError(
            f"weights from {worst.min():g} to {worst.max():g}: the least number and the step of "
            "a group of 4-bit codes are float16, which ends at 65504"
        )
    divisor = step.float().masked_fill(step == 0, 1).unsqueeze(-1)
    codes = ((grouped - low.float().unsqueeze(-1)) / divisor).round().clamp(0, 15)
    groups = torch.stack((low, step), -1).contiguous()
    return Int4Weight(_packed(codes.flatten(1).to(torch.uint8)), groups, "low, step")


def int4_from_gptq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, zero_offset: int = 1
) -> Int4Weight:
    """A layer of a GPTQ checkpoint without reordered columns (``desc_act=False``); copies it once.

    Parameters
    ----------
    qweight
        ``(width / 8, outputs)``, int32: eight codes of a column, the first in the lowest bits.
    qzeros
        ``(groups, outputs / 8)``, int32, the zeros in the same way along the outputs.
    scales
        ``(groups, outputs)``, rounded to float16.
    zero_offset
        What is added to the stored zeros: 1 in checkpoints of the format "gptq", 0 in "gptq_v2".

    Raises
    ------
    ValueError
        Shapes or types that do not fit each other.
    """
    _check_words(qweight, qzeros, scales, (_CODES_PER_WORD, 1))
    order = range(_CODES_PER_WORD)
    codes = _unpacked(qweight.t(), order)
    if zero_offset not in (0, 1):
        raise ValueError(f"zero_offset is {zero_offset!r}; it is 1 (gptq) or 0 (gptq_v2)")
    zeros = _unpacked(qzeros, order).t() + zero_offset
    return _of_zeros(codes, zeros, scales)


def int4_from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    """A layer of an AWQ checkpoint (version "gemm"); copies it once.

    Parameters
    ----------
    qweight
        ``(width, outputs / 8)``, int32: eight outputs a word, in AWQ's order.
    qzeros
        ``(groups, outputs / 8)``, int32, in the same way.
    scales
        ``(groups, outputs)``, rounded to float16.

    Raises
    ------
    ValueError
        Shapes or types that do not fit each other.
    """
    _check_words(qweight, qzeros, scales, (1, _CODES_PER_WORD))
    codes = _unpacked(qweight, _AWQ_ORDER).t().contiguous()
    return _of_zeros(codes, _unpacked(qzeros, _AWQ_ORDER).t(), scales)


def _of_zeros(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight:
    steps = scales.half()
    if (steps.isinf() & ~scales.isinf()).any():
        raise ValueError(
            f"scales of up to {scales.abs().max():g}: the steps of 4-bit codes are float16, which "
            "ends at 65504"
        )
    groups = torch.stack((zeros.half(), steps.t()), -1).contiguous()
    return Int4Weight(_packed(codes), groups, "zero, step")


def _check_words(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, codes: tuple[int, int]
) -> None:
    """``codes``: how many a word of ``qweight`` has of a row's width, and of the outputs."""
    shape = qweight.shape if qweight.dim() == 2 else (0, 0)
    width, outputs = shape[0] * codes[0], shape[1] * codes[1]
    groups = scales.shape[0] if scales.dim() == 2 else 0
    fits = (
        qweight.dim() == 2
        and qweight.dtype is torch.int32
        and qzeros.dtype is torch.int32
        and scales.is_floating_point()
        and groups > 0
        and width % groups == 0
        and scales.shape[1] == outputs
        and tuple(qzeros.shape) == (groups, outputs // _CODES_PER_WORD)
    )
    if not fits:
        raise ValueError(
            f"qweight {tuple(qweight.shape)} of {qweight.dtype}, qzeros {tuple(qzeros.shape)} of "
            f"{qzeros.dtype} and scales {tuple(scales.shape)} of {scales.dtype} do not fit each "
            "other"
        )
    if width // groups % 32:
        raise ValueError(f"groups of {width // groups} codes: give a multiple of 32")


def _unpacked(words: torch.Tensor, order: range | tuple[int, ...]) -> torch.Tensor:
    """``(rows, 8 * words)``, uint8: the codes of int32 words."""
    shifts = 4 * torch.tensor(tuple(order), dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.flatten(1).to(torch.uint8)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the upper half."""
    return (codes[:, 0::2] << 4 | codes[:, 1::2]).contiguous()
