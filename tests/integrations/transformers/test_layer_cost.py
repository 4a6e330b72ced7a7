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
from cxl_offload.integrations.transformers import by_kernel, first_rooms, offload
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.ops.threads import team_for
from cxl_offload.plan.decoding.engine import TRANSFORMERS

from .calls_of_torch import AllCallsOfTorch

PRODUCTS = ("mm", "addmm", "bmm", "linear")

attending: list[bool] = []
"""Attention over a cache that is running: it is timed with all that it calls."""


@pytest.fixture
def attention_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted inside of it."""
    whole = by_kernel.decode_attention

    def call(*args: Any, **options: Any) -> torch.Tensor:
        attending.append(True)
        try:
            return whole(*args, **options)
        finally:
            attending.pop()

    monkeypatch.setattr(by_kernel, "decode_attention", call)


class CallsOfTorch(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, products left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not attending and func.overloadpacket.__name__ not in PRODUCTS
        return func(*args, **(kwargs or {}))


def cost_of_a_generation(layers: int, new: int) -> tuple[int, int]:
    """Calls of torch and instructions of the interpreter for so many tokens."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids, counted = torch.randint(3, 60, (2, 9)), 0

    def generate() -> None:
        seen = torch.ones_like(ids)
        model.generate(ids, attention_mask=seen, max_new_tokens=new, do_sample=False)

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode" and not attending
        return count

    with torch.no_grad(), offload(model, {"kv": "first-touch"}, session=Session.linux()):
        generate()
        with CallsOfTorch() as calls:
            generate()
        before = sys.gettrace()
        sys.settrace(count)
        try:
            generate()
        finally:
            sys.settrace(before)
    return calls.count, counted


@pytest.mark.usefixtures("attention_apart")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counted with Python 3.11")
def test_a_generation_takes_as_many_calls_and_instructions_as_the_planner_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a layer, of a step beside its layers, and of a generation beside its steps."""
    monkeypatch.setattr(first_rooms, "_MOST_SHARED", 0)  # caches that are planned are larger
    counted = {(n, new): cost_of_a_generation(n, new) for n in (2, 4) for new in (4, 8)}
    found = []
    for at in (0, 1):
        step = {n: (counted[n, 8][at] - counted[n, 4][at]) / 4 for n in (2, 4)}
        layer = (step[4] - step[2]) / 2
        beside = step[2] - 2 * layer
        found.append((layer, beside, counted[2, 4][at] - 4 * step[2]))
    engine = TRANSFORMERS
    assert found[0] == pytest.approx(
        (engine.layer_calls, engine.step_calls, engine.start_calls), rel=0.1
    )
    assert found[1] == pytest.approx(
        (engine.layer_instructions, engine.step_instructions, engine.start_instructions), rel=0.1
    )


def test_attention_over_a_cache_in_two_places_takes_as_many_calls_as_the_planner_counts() -> None:
    """More than over one on the host; products count here, as they are of one query."""
    query = torch.randn(2, 8, 1, 64, dtype=torch.bfloat16)
    kept = torch.randn(2, 2, 2, 40, 64, dtype=torch.bfloat16)
    scores, team = by_kernel.Scores(None, None, {}), team_for(1)

    def calls(attend: Any, *states: torch.Tensor) -> int:
        with AllCallsOfTorch() as counted:
            attend(query, *states, scores, team)
        return counted.count

    parted = (PartedStates(each[:, :, :10], each[:, :, 10:], each.device) for each in kept)
    more = calls(by_kernel.by_kernel_and_accelerator, *parted) - calls(by_kernel.by_kernel, *kept)
    assert more == pytest.approx(TRANSFORMERS.joined_calls, rel=0.1)
