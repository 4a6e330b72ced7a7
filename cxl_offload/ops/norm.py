"""Root-mean-square norms of rows, as LLaMA and its kin have them.

PyTorch computes such a norm in seven passes over temporaries in float32. :func:`rms_norm` reads a
row, computes in registers and writes the row once, with the roundings that those passes have.
"""

from __future__ import annotations

import math

import torch

from cxl_offload import _C
from cxl_offload.ops.threads import Threads, team_for
from cxl_offload.ops.view import (
    FLOATS,
    as_of_now,
    check_class,
    has_plain_rows,
    refuse_derivatives,
    refuse_recording,
    tensor_view,
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    threads: Threads = None,
    isa: str = "",
) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x * x) + eps))``, the mean over the last dimension.

    Parameters
    ----------
    x
        ``(..., width)``, float32, bfloat16 or float16, in host memory. Rows are any number of
        elements apart; where the elements of a row are, x is copied first.
    weight
        ``(width,)``, contiguous, of x's type.
    eps
        Added to the mean, in float32.
    threads
        See :data:`cxl_offload.ops.threads.Threads`. Few rows are computed by the caller alone.
    isa
        "scalar", "neon", "sve256", "avx2" or "avx512"; empty: the best that this processor has.

    Returns
    -------
    torch.Tensor
        Of x's shape and type, new, contiguous and without a derivative. The mean and the quotient
        are float32; the quotient is rounded to x's type before weight is multiplied by it, and the
        product is rounded again. These are the roundings of ``LlamaRMSNorm`` of transformers, which
        adds the squares in another order. A row has the same bits whatever the other rows and the
        number of threads are.

    Raises
    ------
    ValueError, TypeError
        Before anything is computed: shapes, types or strides that do not fit, or gradients that are
        wanted.
    """
    refuse_recording("rms_norm")
    refuse_derivatives("rms_norm", x, weight)
    check_class(x, "x")
    check_class(weight, "weight")
    x, weight = as_of_now(x), as_of_now(weight)
    if x.dim() == 0:
        raise ValueError("rms_norm: x has no dimension; give it (..., width)")
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps {eps}; give a number of at least 0")
    x = x.resolve_neg()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    viewed = tensor_view(rows, "x", strided=True)
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    weights, written = tensor_view(weight, "weight"), tensor_view(y, "y")
    _C.run_norm(viewed, weights, written, float(eps), team_for(threads), isa)
    return y.view(x.shape)


def rms_norm_or_none(
    x: torch.Tensor, weight: torch.Tensor, eps: float, threads: Threads = None
) -> torch.Tensor | None:
    """As :func:`rms_norm`, contiguous rows some microseconds sooner; None for what it refuses.

    Nothing is said about gradients.
    """
    width = weight.shape[-1] if weight.dim() == 1 else -1
    if weight.dtype is not x.dtype:
        return None
    weight = as_of_now(weight)  # a parameter; this keeps its memory while the kernel reads it
    if not has_plain_rows(weight, width):
        return None
    if not has_plain_rows(x, width):
        return rms_norm(x, weight, eps, threads) if _has_rows_apart(x, width) else None
    y = x.new_empty(x.shape)
    shape = (x.numel() // width, width)
    addresses = x.data_ptr(), weight.data_ptr(), y.data_ptr()
    _C.run_plain_norm(*addresses, shape, FLOATS[x.dtype], eps, team_for(threads))
    return y


def _has_rows_apart(x: torch.Tensor, width: int) -> bool:
    """Whether rows are plain but for what lies between them, as in a part of a projection."""
    if type(x) is not torch.Tensor or x.layout is not torch.strided or not x.numel():
        return False
    return not x.is_contiguous() and has_plain_rows(x[(0,) * (x.dim() - 1)], width)
