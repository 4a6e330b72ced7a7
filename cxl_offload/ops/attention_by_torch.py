"""Attention over a part of the positions by torch's operators, on whatever device they are.

Beside :func:`~cxl_offload.ops.attention.decode_attention_partial`, which reads host memory: a part
of a cache on an accelerator is read there, and :func:`~cxl_offload.ops.attention.combine` joins
the two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from cxl_offload.ops.attention import Partial, combine

_MOST_COPIED_BYTES = 64 << 20
"""Keys of so many bytes become float32 at a time, and as many of values: what is beside a cache."""


def _as_float(kept: torch.Tensor) -> torch.Tensor:
    return kept.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How scores become weights.

    Attributes
    ----------
    scale
        Factor of the scores; None: ``1 / sqrt(dim)``.
    soft_cap
        Scores become ``soft_cap * tanh(score / soft_cap)``; None: they are kept.
    mask
        Bool, ``(batch, heads, queries, positions)`` or what expands to it: False is not attended.
    bias
        What is added to the scores after their cap, of the same shape.
    """

    scale: float | None = None
    soft_cap: float | None = None
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def partial_by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ScoreOptions,
    *,
    numbers: Callable[[torch.Tensor], torch.Tensor] = _as_float,
) -> Partial:
    """``softmax(scale * q k^T) v`` over these positions, all in float32, and its log-sum-exp.

    Parameters
    ----------
    q
        ``(batch, heads, queries, dim)``.
    k, v
        ``(batch, kv_heads, positions, any)``, on q's device; ``heads`` is a multiple of
        ``kv_heads`` (grouped queries).
    options
        Their tensors are on q's device.
    numbers
        Makes float32 ``(batch, kv_heads, positions, dim)`` of some positions of k or v.

    Returns
    -------
    Partial
        On q's device: ``out`` like q, ``log_sum_exp`` without ``dim``. Zeros and minus infinity for
        a query that attends to nothing.
    """
    batch, kv_heads, positions = k.shape[:3]
    at_once = max(1, _MOST_COPIED_BYTES // max(1, batch * kv_heads * q.shape[-1] * 4))
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if options.scale is None else options.scale
    with _in_full_precision(q.device):
        scaled = q.float() * scale
        parts = []
        for begin in range(0, max(positions, 1), at_once):
            some = slice(begin, min(begin + at_once, positions))
            keys, values = numbers(k[:, :, some]), numbers(v[:, :, some])
            parts.append(_over(scaled, keys, values, options, some))
        return parts[0] if len(parts) == 1 else combine(parts)


def _over(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    options: ScoreOptions,
    some: slice,
) -> Partial:
    """Over some of the positions, with a scaled query."""
    if not keys.shape[2]:
        return Partial(torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf))
    batch, heads, queries, dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads * queries, dim)
    scores = (grouped @ keys.mT).view(batch, heads, queries, keys.shape[2])
    if options.soft_cap is not None:
        scores = options.soft_cap * (scores / options.soft_cap).tanh()
    if options.bias is not None:
        scores = scores + options.bias[..., some].float()
    if options.mask is not None:
        scores = scores.masked_fill(~options.mask[..., some], -math.inf)
    sums = scores.logsumexp(dim=-1)
    most = sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)
    weights = (scores - most).exp().view(batch, kv_heads, -1, keys.shape[2])
    return Partial((weights @ values).view(batch, heads, queries, values.shape[-1]), sums)


def _in_full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast would round what is joined with float32."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
