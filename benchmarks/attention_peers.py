"""Decode attention of other projects, where they are installed, for bench_attention.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks import ggml_attention, vllm_attention

MODULES = {each.NAME: each for each in (ggml_attention, vllm_attention)}


def peers_of(
    names: Sequence[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, threads: int
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, str]]:
    """Those of the names that take part, and why the others do not."""
    made: dict[str, Callable[[], torch.Tensor]] = {}
    left_out: dict[str, str] = {}
    for name, module in MODULES.items():
        if name in names:
            reason = module.why_not(k)
            if reason:
                left_out[name] = reason
            else:
                made[name] = module.Attention(q, k, v, threads=threads)
    return made, left_out


def tolerance(name: str, k: torch.Tensor) -> float:
    """By how much of the greatest result a contender may differ from float64 over such a cache."""
    if name in MODULES:
        return MODULES[name].tolerance(k)
    return 4 * float(torch.finfo(k.dtype).eps)
