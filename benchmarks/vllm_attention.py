"""vLLM's decode attention on the CPU: the operators of its own back end, over a paged cache.

vLLM's kernels use the OpenMP threads of torch: ``torch.set_num_threads`` holds for them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import cxl_offload

NAME = "vLLM"
BLOCK_TOKENS = 128
"""Of a block of the cache. Source: what vLLM chooses for a CPU."""


def why_not(k: torch.Tensor) -> str:
    """Why it does not take part; empty where it does."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    try:
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    except ImportError as error:
        return f"vllm has another attention on the CPU: {error}"
    if not hasattr(_custom_ops, "cpu_attention_with_kv_cache"):
        return "vllm has another attention on the CPU"
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "vllm was not built for a CPU"
    if k.dtype not in CPUAttentionBackend.supported_dtypes:
        return f"it has no {k.dtype}"
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    return "" if k.shape[3] in sizes else f"it has no heads of {k.shape[3]}, only of {sizes}"


class Attention:
    """Attention of one query a head over K and V in vLLM's blocks, one after the other.

    Parameters
    ----------
    q
        ``(batch, heads, dim)``; kept.
    k, v
        ``(batch, heads, seq, dim)``; copied to blocks, in huge pages as they are.
    threads
        Those of torch, which vLLM takes: must be ``torch.get_num_threads()``.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, threads: int) -> None:
        if threads != torch.get_num_threads():
            raise ValueError(f"{threads} threads: torch has {torch.get_num_threads()}")
        from vllm import envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        batch, heads, seq, dim = k.shape
        self._q, self._out = q.contiguous(), torch.empty_like(q)
        self._isa = _get_attn_isa(k.dtype, BLOCK_TOKENS, dim, "auto")
        per_row = -(-seq // BLOCK_TOKENS)
        self._blocks = torch.arange(batch * per_row, dtype=torch.int32).view(batch, per_row)
        cache = cxl_offload.zeros(
            (batch * per_row, heads, 2 * BLOCK_TOKENS, dim), dtype=k.dtype, pages="thp"
        )
        self._k, self._v = cache.chunk(2, dim=2)
        self._fill(k, v)
        self._starts = torch.arange(batch + 1, dtype=torch.int32)
        self._lengths = torch.full((batch,), seq, dtype=torch.int32)
        self._schedule = _ops().cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=q.shape[1],
            num_kv_heads=heads,
            head_dim=dim,
            seq_lens=self._lengths,
            dtype=q.dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def __call__(self) -> torch.Tensor:
        """The result, of the shape and type of q; the next call overwrites it."""
        _ops().cpu_attention_with_kv_cache(
            query=self._q,
            key_cache=self._k,
            value_cache=self._v,
            output=self._out,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=self._q.shape[2] ** -0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._blocks,
            softcap=0.0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )
        return self._out

    def _fill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """As vLLM writes new tokens, sequence by sequence."""
        positions = torch.arange(k.shape[2])
        for row, blocks in enumerate(self._blocks.long()):
            slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            keys, values = (each[row].transpose(0, 1).contiguous() for each in (k, v))
            _ops().cpu_attn_reshape_and_cache(keys, values, self._k, self._v, slots, self._isa)


def _ops() -> Any:
    from vllm import _custom_ops

    return _custom_ops


def tolerance(k: torch.Tensor) -> float:
    """By how much of the greatest result it may differ from float64."""
    return 4 * float(torch.finfo(k.dtype).eps)
