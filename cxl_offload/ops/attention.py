"""Decode attention where the KV cache lies: few queries a sequence, keys and values read once.

Caches stay in host memory as float32, bfloat16, float16, float8 or 4-bit codes of any strides. No
copy of their size is made: rows become float32 in registers. Results over parts of a cache (one in
DRAM, one on a CXL node, one on a GPU) are joined by :func:`combine`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cxl_offload import _C
from cxl_offload.memory.bounds import quoted
from cxl_offload.ops.attention_arguments import (
    MOST_POSITIONS,
    AttentionOptions,
    CacheLike,
    Scale,
    SequenceLengths,
    bias_view,
    cache_views,
    length_list,
    mask_address,
    most_positions,
    one_after_another,
    query_view,
    real_number,
    scale_list,
    table_address,
)
from cxl_offload.ops.threads import Threads, kernel_for, team_for
from cxl_offload.ops.view import refuse_derivatives, refuse_recording, tensor_view

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the positions.

    Attributes
    ----------
    out
        ``(batch, heads, dim)`` or ``(batch, heads, queries, dim)`` as q, float32: the result if
        these positions were all.
    log_sum_exp
        The same without ``dim``, float32: the logarithm of the sum of ``exp(score)``; minus
        infinity where nothing is attended.
    """

    out: torch.Tensor
    log_sum_exp: torch.Tensor


def from_flexgen(cache: torch.Tensor, batch: int) -> torch.Tensor:
    """FlexGen's cache ``(seq, batch * heads, dim)`` as ``(batch, heads, seq, dim)``; no copy.

    Raises
    ------
    ValueError
        Not of three dimensions, or the second is no multiple of ``batch``.
    """
    if cache.dim() != 3 or batch < 1 or cache.shape[1] % batch:
        raise ValueError(
            f"a cache of shape {tuple(cache.shape)} is not (seq, {batch} * heads, dim)"
        )
    seq, heads, dim = cache.shape
    apart = cache.as_strided(
        (seq, batch, heads // batch, dim),
        (cache.stride(0), cache.stride(1) * (heads // batch), *cache.stride()[1:]),
    )
    return apart.permute(1, 2, 0, 3)


def decode_attention(
    q: torch.Tensor,
    k: CacheLike,
    v: CacheLike,
    *,
    sinks: torch.Tensor | None = None,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` for one query a sequence and head, or a few.

    Parameters
    ----------
    q
        ``(batch, heads, dim)``, float32, bfloat16 or float16. Or ``(batch, heads, queries, dim)``:
        queries at the last positions of each sequence, as in speculative decoding or the last chunk
        of a prompt; each row of the caches is read once for all of them.
    k, v
        ``(batch, kv_heads, seq, dim)`` of one float type, float8_e4m3fn and float8_e5m2 among them,
        and of any strides but that of the last dimension, which is contiguous; ``heads`` is a
        multiple of ``kv_heads`` (grouped queries). FlexGen's caches go through
        :func:`from_flexgen`. With ``block_table``: ``(blocks, block_size, kv_heads, dim)``, vLLM's
        layout. Caches of 4-bit codes: see :class:`~cxl_offload.ops.int4_cache.Int4Cache`.
    lengths
        Positions of each sequence, 0 to ``seq``; None: all. Needed with ``block_table``.
    scale
        Factor of the scores; None: ``1 / sqrt(dim)``.
    block_table
        ``(batch, columns)``, int32: the block that holds each ``block_size`` positions. Entries
        beyond a sequence's length are not read.
    mask
        ``(batch, seq)``, bool, contiguous: False is not attended, and its bytes are not read.
    window
        Attend only to the last so many positions of each sequence.
    k_scale, v_scale
        What the numbers of the caches are multiplied by: a number, or a tensor of one or of
        ``kv_heads``; None: 1.
    soft_cap
        Scores become ``soft_cap * tanh(score / soft_cap)``, as in Gemma 2; None: they are kept.
    bias
        What is added to the scores then: float32, ``(batch, heads, queries, seq)`` or what expands
        to it (without ``queries`` where q has none). For ALiBi ``slopes[:, None] * positions``;
        minus infinity hides a position from a query.
    sinks
        ``(heads,)``: a score of each head that takes its share of the weights and has no value.
    causal
        Whether query ``i`` of ``n`` sees only the first ``length - n + 1 + i`` positions; False:
        all see all.
    threads
        See :data:`cxl_offload.ops.threads.Threads`.
    isa
        "scalar", "neon", "sve256", "avx2" or "avx512"; "avx512vnni", which multiplies 4-bit codes
        as integers; "avx512bf16", which multiplies queries and keys of bfloat16 as they are; empty:
        the best that this processor has.

    Returns
    -------
    torch.Tensor
        Like q. Zeros for a query that attends to nothing, or whose
        scores are all minus infinity. Sums are float32; NaN and infinity spread as in the formula:
        a value that is NaN spreads to queries that see others of its sequence only, too, where
        ``bias`` or ``causal`` hide it.
        The same bits for any number of threads.

    Raises
    ------
    ValueError, TypeError
        Before anything is computed: shapes, types, strides, lengths or blocks that do not fit, or
        gradients that are wanted.
    RuntimeError
        Under ``torch.jit.trace`` or ``make_fx``, which would not record it.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _run(q, k, v, out, None, sinks=sinks, **options)
    return out


def decode_attention_partial(
    q: torch.Tensor, k: CacheLike, v: CacheLike, **options: Unpack[AttentionOptions]
) -> Partial:
    """As :func:`decode_attention`, over a part of the positions; :func:`combine` joins parts.

    With several queries ``causal`` is for the last part; parts before it take False. Sinks belong
    to no part: they are one of their own, of zeros and the sinks as ``log_sum_exp``.
    """
    out = torch.empty_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    sums = torch.empty(q.shape[:-1], dtype=torch.float32, device="cpu")
    _run(q, k, v, out, sums, sinks=None, **options)
    return Partial(out, sums)


def combine(partials: Sequence[Partial]) -> Partial:
    """Attention over all the positions of ``partials``, which have none in common.

    Equal to attention over the joined cache, except for rounding: weights are computed in float64.
    Parts may come from elsewhere (a GPU kernel), when moved to one device.

    Raises
    ------
    ValueError
        No part, or parts of different shapes.
    """
    partials = list(partials)
    if not partials:
        raise ValueError("combine: no partial results; give at least one")
    shapes = {(part.out.shape, part.log_sum_exp.shape) for part in partials}
    if len(shapes) > 1:
        raise ValueError(f"combine: parts of different shapes: {sorted(map(str, shapes))}")
    sums = torch.stack([part.log_sum_exp for part in partials]).double()
    most = sums.amax(dim=0)
    none = most == -math.inf
    weights = (sums - most.masked_fill(none, 0)).exp()
    total = weights.sum(dim=0)
    shares = weights / total.masked_fill(none, 1)
    outs = torch.stack([part.out for part in partials]).double()
    # A part that attended to nothing has zeros, never a NaN.
    out = (shares.unsqueeze(-1) * outs).sum(dim=0)
    return Partial(out.float(), (most + total.log()).masked_fill(none, -math.inf).float())


# Long, with many parameters: the core's, a line for each; callers have AttentionOptions.
def _run(
    q: torch.Tensor,
    k: CacheLike,
    v: CacheLike,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    *,
    sinks: torch.Tensor | None,
    lengths: SequenceLengths = None,
    scale: float | None = None,
    block_table: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    soft_cap: float | None = None,
    bias: torch.Tensor | None = None,
    causal: bool = True,
    threads: Threads = None,
    isa: str = "",
) -> None:
    refuse_recording("decode_attention")
    refuse_derivatives("decode_attention", q, k, v, bias, sinks)
    queries = query_view(q, window, soft_cap)
    if not isinstance(causal, int):  # a bool is one
        raise TypeError(f"causal {quoted(causal)} is neither True nor False")
    keys, values, groups = cache_views(k, v, block_table is not None)
    attended = length_list(lengths)
    team = team_for(threads)
    _C.run_attention(
        queries if q.dim() == 3 else tensor_view(one_after_another(q), "q"),
        keys,
        values,
        tensor_view(one_after_another(out), "out"),
        team,
        scale=1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else real_number(scale, "scale"),
        lengths=attended,
        table=table_address(block_table, q.shape[0]),
        mask=mask_address(mask, q.shape[0]),
        window=0 if window is None else min(window, MOST_POSITIONS),
        groups=groups,
        k_scales=scale_list(k_scale, "k_scale"),
        v_scales=scale_list(v_scale, "v_scale"),
        queries=q.shape[2] if q.dim() == 4 else 1,
        causal=causal,
        soft_cap=soft_cap or 0,
        bias=None if bias is None else bias_view(bias, q, most_positions(k, attended)),
        sinks=scale_list(sinks, "sinks"),
        log_sum_exp=0 if sums is None else sums.data_ptr(),
        isa=isa,
        kernel=kernel_for(team),
    )
