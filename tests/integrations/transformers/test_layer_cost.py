"""What a decoder layer costs beside its products, as the planner's constants say."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from cxl_offload import Session
from cxl_offload.integrations.transformers import offload
from cxl_offload.plan.decoding.engine import TRANSFORMERS

PRODUCTS = ("mm", "addmm", "bmm", "linear")


class CallsOfTorch(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, products left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in PRODUCTS
        return func(*args, **(kwargs or {}))


def cost_of_a_token(layers: int) -> tuple[int, int]:
    """Calls of torch and instructions of the interpreter for one decoded token."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids, counted = torch.randint(3, 60, (2, 9)), 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode"
        return count

    with torch.no_grad(), offload(model, {"kv": "first-touch"}, session=Session.linux()):
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache)
        with CallsOfTorch() as calls:
            model(ids[:, :1], past_key_values=cache)
        before = sys.gettrace()
        sys.settrace(count)
        try:
            model(ids[:, :1], past_key_values=cache)
        finally:
            sys.settrace(before)
    return calls.count, counted


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted with Python 3.11")
def test_a_layer_takes_as_many_calls_and_instructions_as_the_planner_counts() -> None:
    fewer, more = cost_of_a_token(2), cost_of_a_token(4)
    calls, instructions = ((b - a) / 2 for a, b in zip(fewer, more, strict=True))
    assert calls == pytest.approx(TRANSFORMERS.layer_calls, rel=0.1)
    assert instructions == pytest.approx(TRANSFORMERS.layer_instructions, rel=0.1)
