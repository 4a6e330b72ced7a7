"""What kept prefixes depend on besides the tokens: another model finds nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import offload, prefix_facts
from cxl_offload.memory import Session

from .models import generate, make
from .prefix_prompts import CXL, counts_of, forget, kept, texts


def other_dtype(model: PreTrainedModel) -> PreTrainedModel:
    return model.to(torch.bfloat16)


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    forget(model)
    return model


def other_positions(model: PreTrainedModel) -> PreTrainedModel:
    model.model.rotary_emb.inv_freq *= 0.5
    return model


def other_configuration(model: PreTrainedModel) -> PreTrainedModel:
    model.config.rms_norm_eps *= 2
    return model


def other_attention(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


def other_scaling(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    return model


def other_epsilon(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 1.0
    return model


def other_activation(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()
    return model


def other_forward(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.forward = torch.neg
    return model


def training_norm(model: PreTrainedModel) -> PreTrainedModel:
    model.model.layers[0].input_layernorm.train()
    return model


ATTRIBUTES = [other_scaling, other_epsilon, other_activation, other_forward, training_norm]
OTHERS = [other_dtype, other_weights, other_positions, other_configuration, other_attention]


@pytest.mark.parametrize("other", [*OTHERS, *ATTRIBUTES])
def test_blocks_of_another_model_are_dropped(
    other: Callable[[PreTrainedModel], PreTrainedModel],
    name: str,
    session: Session,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with offload(make("llama"), CXL, prefixes=kept(name), session=session) as done:
        generate(done.model, **texts(0))
    changed = other(make("llama"))
    expected = generate(changed, **texts(0))
    with offload(changed, CXL, prefixes=kept(name), session=session) as done:
        assert torch.equal(generate(changed, **texts(0)), expected)
        assert counts_of(done).found_tokens == 0
    assert "dropped the kept blocks" in caplog.text


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "protection taken out"])
@pytest.mark.parametrize("change", ATTRIBUTES)
def test_attributes_that_change_in_the_block_hit_nothing(
    change: Callable[[PreTrainedModel], object],
    seen: bool,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, changed = make("llama"), make("llama")
    change(changed)
    expected = generate(changed, "sdpa", **texts(0, seed=2))
    if not seen:
        monkeypatch.setattr(prefix_facts, "_plain_attributes", lambda model: [])
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        generate(model, **texts(0))
        change(model)
        tokens = generate(model, **texts(0, seed=2))
        assert (counts_of(done).found_tokens == 0) == seen
        assert not seen or torch.equal(tokens, expected)
        generate(model, **texts(0, seed=2))
        assert counts_of(done).found_tokens > 0  # of the changed model, whose blocks stay


def test_what_a_model_keeps_for_itself_drops_nothing(session: Session) -> None:
    """As those do that also see: positions of the prompt before, for the tokens after it."""
    model = make("llama")
    model.model.rope_deltas = None
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        generate(model, **texts(0))
        model.model.rope_deltas = torch.zeros(1)
        model.model.layers[0]._calls = 1
        generate(model, **texts(0))
        assert counts_of(done).found_tokens == 28


def test_place_of_a_model_and_the_way_it_is_offloaded_drop_nothing(
    name: str, session: Session
) -> None:
    with offload(make("llama"), CXL, prefixes=kept(name), session=session) as done:
        generate(done.model, **texts(0))
    moved = make("llama")
    moved.name_or_path = "elsewhere/" + Path(str(moved.name_or_path)).name
    options: dict[str, Any] = {"linear_rows": 1, "rows_at_once": 1}
    with offload(moved, CXL, prefixes=kept(name), session=session, **options) as done:
        generate(moved, **texts(0))
        assert counts_of(done).found_tokens == 28


def by_address(model: PreTrainedModel) -> None:
    """As a kernel of an optimizer does: torch counts no version."""
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight._version
    weight.data.mul_(-1)
    assert weight._version == before


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "protection taken out"])
@pytest.mark.parametrize("change", [forget, by_address])
def test_weights_that_change_in_the_block_hit_nothing(
    change: Callable[[PreTrainedModel], object],
    seen: bool,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And when they change back, the blocks from before are right again."""
    model, changed = make("llama"), make("llama")
    change(changed)
    expected = generate(changed, "sdpa", **texts(0, seed=2))
    if not seen:
        monkeypatch.setattr(prefix_facts, "_looks", lambda model: b"always the same")
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        generate(model, **texts(0))
        change(model)
        assert torch.equal(generate(model, **texts(0, seed=2)), expected) == seen
        assert (counts_of(done).found_tokens == 0) == seen
        change(model)
        generate(model, **texts(0))
        assert counts_of(done).found_tokens == (28 if seen else 24 + 28)
