"""vLLM's own attention, as benchmarks/vllm_attention.py calls it, against float64."""

from __future__ import annotations

import pytest
import torch

from benchmarks import vllm_attention
from benchmarks.attention_peers import peers_of

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


def inputs(dtype: torch.dtype, dim: int = 64) -> tuple[torch.Tensor, ...]:
    """Three sequences of 300 positions, two and a half of vLLM's blocks, and three heads."""
    source = torch.Generator().manual_seed(5)
    k, v = (torch.randn(3, 3, 300, dim, generator=source).to(dtype) for _ in "kv")
    return torch.randn(3, 3, dim, generator=source).to(dtype), k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_vllm_attends_as_float64_does(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    attends, left_out = peers_of([vllm_attention.NAME], q, k, v, torch.get_num_threads())
    assert not left_out
    weights = torch.einsum("bhd,bhsd->bhs", q.double(), k.double()).mul(64**-0.5).softmax(dim=2)
    expected = torch.einsum("bhs,bhsd->bhd", weights, v.double())
    found = attends[vllm_attention.NAME]()
    most = vllm_attention.tolerance(k) + 1e-6
    assert off(found, expected) <= most
    assert off(found, expected.flip(0)) > most


def test_vllm_says_which_heads_it_does_not_have() -> None:
    assert "heads of 48" in vllm_attention.why_not(inputs(torch.bfloat16, 48)[1])
