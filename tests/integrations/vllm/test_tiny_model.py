"""Rounding decides no token of the tiny model, so that other tokens mean another KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.integrations.vllm.tiny_model import DTYPE, make_model, prompt

SEEDS, TOKENS = range(6), 16


@pytest.mark.parametrize(("dtype", "is_sure"), [(DTYPE, True), ("bfloat16", False)])
def test_best_tokens_are_apart_by_far_more_than_rounding_moves_them(
    dtype: str, is_sure: bool, tmp_path: Path
) -> None:
    """The control: in bfloat16 they are not."""
    make_model(tmp_path)
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    rounded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    apart, moved = [], []
    for seed in SEEDS:
        ids = torch.tensor([prompt(seed)])
        with torch.no_grad():
            answer = exact.generate(
                ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            right, other = (each(answer).logits[0, -TOKENS - 1 : -1] for each in (exact, rounded))
        best = right.topk(2).values
        apart.append(float((best[:, 0] - best[:, 1]).min()))
        moved.append(float((other.double() - right).abs().max()))
    assert (min(apart) > 100 * max(moved)) is is_sure, (apart, moved)
