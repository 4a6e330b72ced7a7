"""Turns the arguments of decode attention into what the kernel takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import torch

from cxl_offload import _C
from cxl_offload.memory.bounds import check_bounds, quoted, whole_number
from cxl_offload.ops.int4_cache import Int4Cache
from cxl_offload.ops.threads import Threads
from cxl_offload.ops.view import FLOATS, READ_FLOATS, check_class, tensor_view
from cxl_offload.renamed import old_names

SequenceLengths = torch.Tensor | Sequence[int] | None
Scale = torch.Tensor | float | None
CacheLike = torch.Tensor | Int4Cache

MOST_POSITIONS = 2**62
"""The core counts in 64 bits; no memory holds as many."""

Groups = tuple[_C.TensorView, _C.TensorView, bool]


class AttentionOptions(TypedDict, total=False):
    """Keywords of attention, explained at :func:`cxl_offload.ops.attention.decode_attention`."""

    lengths: SequenceLengths
    scale: float | None
    block_table: torch.Tensor | None
    mask: torch.Tensor | None
    window: int | None
    k_scale: Scale
    v_scale: Scale
    soft_cap: float | None
    bias: torch.Tensor | None
    causal: bool
    threads: Threads
    isa: str


def real_number(value: object, name: str) -> float:
    """A number, also one in a tensor; TypeError by its name for anything else."""
    try:
        if not isinstance(value, str | bytes):  # float() would read it
            return float(value)  # type: ignore[arg-type]
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} {quoted(value)} is no number")


def query_view(q: torch.Tensor, window: int | None, soft_cap: float | None) -> _C.TensorView:
    """The view of q; ValueError or TypeError for a q, window or cap that attention cannot have."""
    view = tensor_view(q, "q")  # says what is wrong with it before its shape is asked for
    if q.dim() not in (3, 4):
        raise ValueError(
            f"q of shape {tuple(q.shape)} is not (batch, heads, dim), nor (batch, heads, queries, "
            "dim)"
        )
    if window is not None and whole_number(window, "window") < 1:
        raise ValueError(f"window {window}: give at least 1, or None for all positions")
    if soft_cap is not None and not real_number(soft_cap, "soft_cap") > 0:
        raise ValueError(f"soft_cap {soft_cap}: give a positive number, or None for no cap")
    return view


def cache_views(
    k: CacheLike, v: CacheLike, by_blocks: bool
) -> tuple[_C.TensorView, _C.TensorView, Groups | None]:
    """Views of both, heads before positions, and of the scales of codes."""
    if isinstance(k, Int4Cache) and isinstance(v, Int4Cache):
        if k.form != v.form:
            raise ValueError(f"scales of k are {k.form!r} and of v {v.form!r}; give both one form")
        if by_blocks:
            k, v = k.heads_before_positions(), v.heads_before_positions()
        (keys, k_scales), (values, v_scales) = k.views("k"), v.views("v")
        return keys, values, (k_scales, v_scales, k.form == "rate, low")
    if isinstance(k, Int4Cache) or isinstance(v, Int4Cache):
        raise ValueError("one of k and v is of 4-bit codes and the other is not; give both alike")
    if by_blocks and k.dim() == 4 and v.dim() == 4:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return (
        tensor_view(k, "k", dtypes=READ_FLOATS, strided=True),
        tensor_view(v, "v", dtypes=READ_FLOATS, strided=True),
        None,
    )


def one_after_another(q: torch.Tensor) -> torch.Tensor:
    """The queries of a head one after another: ``(batch, heads * queries, dim)``, no copy."""
    return q.flatten(1, 2) if q.dim() == 4 else q


def most_positions(k: CacheLike, lengths: Sequence[int]) -> int:
    """Of the longest sequence; all of the cache where no lengths are given."""
    rows = k.codes if isinstance(k, Int4Cache) else k
    return max(lengths, default=rows.shape[2] if rows.dim() > 2 else 0)


def bias_view(bias: torch.Tensor, q: torch.Tensor, positions: int) -> _C.TensorView:
    """``(batch, heads, queries, seq)``, with strides of zero where numbers are shared.

    One number of a bias may be that of all positions; else it has ``positions`` or more.

    Raises
    ------
    ValueError
        A bias that does not expand to q's shape, or is not float32 on the CPU.
    """
    batch, heads = q.shape[:2]
    queries = q.shape[2] if q.dim() == 4 else 1
    if bias.dim() == 0 or bias.dim() > q.dim():
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} for q of shape {tuple(q.shape)}: its last "
            "dimension is the positions, and there are no more dimensions than q has"
        )
    apart = bias if q.dim() == 4 else bias.unsqueeze(-2)
    try:
        last = max(positions, 1) if bias.shape[-1] == 1 else bias.shape[-1]
        whole = apart.expand(batch, heads, queries, last)
    except RuntimeError:
        raise ValueError(
            f"bias of shape {tuple(bias.shape)} does not expand to q of shape {tuple(q.shape)}, "
            "with positions instead of the last dimension"
        ) from None
    return tensor_view(whole, "bias", dtypes=(torch.float32,), strided=True)


def length_list(lengths: SequenceLengths) -> list[int]:
    if lengths is None:
        return []
    given = lengths.tolist() if isinstance(lengths, torch.Tensor) else list(lengths)
    if not all(isinstance(length, int) and abs(length) <= MOST_POSITIONS for length in given):
        raise ValueError("lengths must be whole numbers of positions, one a sequence")
    return given


def scale_list(scale: Scale, name: str) -> list[float]:
    if scale is None:
        return []
    if not isinstance(scale, torch.Tensor):
        return [float(scale)]
    if scale.dim() > 1 or scale.dtype not in FLOATS:
        raise ValueError(
            f"{name} of shape {tuple(scale.shape)} and {scale.dtype} is not a number, nor one a "
            "head of k and v"
        )
    found: list[float] = scale.reshape(-1).tolist()
    return found


def _check_host_table(tensor: torch.Tensor, name: str, dtype: torch.dtype, batch: int) -> None:
    """Index tables and masks: not numbers that kernels compute with, so tensor_view has no name."""
    check_class(tensor, name)
    if tensor.device.type != "cpu" or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous CPU tensor of {dtype}")
    if tensor.dim() != 2 or tensor.shape[0] != batch:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not ({batch}, positions)")
    check_bounds(tensor, name)


def table_address(block_table: torch.Tensor | None, batch: int) -> tuple[int, int, int]:
    if block_table is None:
        return 0, 0, 0
    _check_host_table(block_table, "block_table", torch.int32, batch)
    if block_table.numel() == 0:
        raise ValueError("block_table is empty; give every sequence at least one column")
    return block_table.data_ptr(), block_table.shape[1], block_table.shape[1]


def mask_address(mask: torch.Tensor | None, batch: int) -> tuple[int, int]:
    if mask is None:
        return 0, 0
    _check_host_table(mask, "mask", torch.bool, batch)
    return mask.data_ptr(), mask.shape[1]


__getattr__ = old_names(__name__)
