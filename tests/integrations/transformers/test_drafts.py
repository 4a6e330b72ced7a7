"""Drafted tokens and drawn ones: from the prompt, from a smaller model, and into a fixed cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import ALIKE, FAMILIES, ONLY_EAGER, generate, make, prompts

CXL = {"kv": "bind:2"}
HELPED = tuple(family for family in ALIKE if family not in ("llama", "mistral", "gemma3"))
"""The others are in test_tokens.py: candidates out of full windows."""
DRAWN: dict[str, Any] = {"do_sample": True, "top_p": 0.95, "temperature": 0.8}


def one_row() -> dict[str, torch.Tensor]:
    """A prompt that says everything twice, so that its tokens can be looked up in it."""
    ids = prompts()["input_ids"][2:3]
    twice = torch.cat([ids[:, :10], ids[:, :10]], dim=1)
    return {"input_ids": twice, "attention_mask": torch.ones_like(twice)}


def asked_in_prompt() -> dict[str, Any]:
    """Without a penalty of repetition the model says the same again, which the look-up finds."""
    return {**one_row(), "repetition_penalty": 1.0, "max_new_tokens": 24}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ALIKE)
def test_tokens_looked_up_in_the_prompt_are_those_of_the_model_alone(
    family: str, session: Session
) -> None:
    model = make(family)
    alone = generate(model, "sdpa", **asked_in_prompt())
    looked_up = {**asked_in_prompt(), "prompt_lookup_num_tokens": 3}
    assert torch.equal(generate(model, "sdpa", **looked_up), alone)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **looked_up)
    layers = model.config.num_hidden_layers
    assert torch.equal(tokens, alone)
    assert done.calls.several >= layers  # several candidates at once
    assert done.calls.prompt == layers
    assert not done.calls.own


def erring(model: PreTrainedModel) -> PreTrainedModel:
    """A smaller model's part: right at times, and never sure."""
    assistant = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.004 * torch.randn_like(weight))
    assistant.generation_config.assistant_confidence_threshold = 0
    return assistant


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", HELPED)
def test_tokens_of_an_assistant_are_those_of_the_model_alone(family: str, session: Session) -> None:
    model = make(family)
    assistant = erring(model)
    one = {**one_row(), "max_new_tokens": 24}  # more than it drafts at once
    alone = generate(model, "sdpa", **one)
    assert torch.equal(generate(model, **one, assistant_model=assistant), alone)
    with (
        offload(model, CXL, session=session) as done,
        offload(assistant, {"kv": "bind:1"}, session=session) as helped,
    ):
        tokens = generate(model, **one, assistant_model=assistant)
        assert session.stats().nodes[1].peak_bytes > 0
    layers = model.config.num_hidden_layers
    assert torch.equal(tokens, alone)
    assert done.calls.several >= layers
    assert done.calls.prompt == layers
    assert not done.calls.own
    assert helped.calls.kernel > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ALIKE)
def test_tokens_drawn_with_an_assistant_are_those_that_stock_draws(
    family: str, session: Session
) -> None:
    """The assistant draws its candidates, and the model draws whether it takes them."""
    model = make(family)
    assistant, options = erring(model), {**one_row(), **DRAWN, "max_new_tokens": 24}
    torch.manual_seed(7)
    stock = generate(model, "sdpa", **options, assistant_model=assistant)
    other = generate(model, **options, assistant_model=assistant)
    with (
        offload(model, CXL, session=session) as done,
        offload(assistant, {"kv": "bind:1"}, session=session) as helped,
    ):
        torch.manual_seed(7)
        tokens = generate(model, **options, assistant_model=assistant)
    assert torch.equal(tokens, stock)
    assert not torch.equal(other, stock)  # they are drawn
    assert done.calls.several >= model.config.num_hidden_layers
    assert not done.calls.own
    assert helped.calls.kernel > 0


@pytest.mark.sampled(9)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_tokens_are_those_that_stock_draws(family: str, cache: str, session: Session) -> None:
    model, options = make(family), {**DRAWN, "cache_implementation": cache}
    torch.manual_seed(7)
    stock = generate(model, "eager" if family in ONLY_EAGER else "sdpa", **options)
    other = generate(model, **options)
    torch.manual_seed(7)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, stock)
    assert not torch.equal(other, stock)  # they are drawn
    assert done.calls.kernel == 9 * model.config.num_hidden_layers
    assert not done.calls.own


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-moe"])
def test_tokens_drawn_with_beams_are_those_that_stock_draws(family: str, session: Session) -> None:
    """Beams that are drawn swap their rows."""
    model, options = make(family), {**DRAWN, "num_beams": 3, "num_return_sequences": 2}
    torch.manual_seed(7)
    stock = generate(model, "sdpa", **options)
    other = generate(model, **options)
    torch.manual_seed(7)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, stock)
    assert not torch.equal(other, stock)
    assert done.calls.kernel == 9 * model.config.num_hidden_layers
    assert not done.calls.own
