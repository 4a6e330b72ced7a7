"""A deep copy of a model that is in a block: as the model was before the block, and its own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import KeptPrefixes, offload
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine

from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import generate, make

ALL = {"kv": "cxl", "weights": "cxl"}
PREFIXES = KeptPrefixes(bytes="1MiB", block_tokens=4)

OPTIONS: dict[str, dict[str, Any]] = {
    "cache": {},
    "weights only": {"policies": {"weights": "cxl"}},
    "rows in parts": {"rows_at_once": 2},
    "linear layers by the kernel": {"linear_rows": 64},
    "linear layers measured": {"linear_rows": "fastest"},
    "kept prompts": {"prefixes": PREFIXES},
    "tuned": {"tune": "step_time", "tune_budget_bytes": 1 << 20},
    "all": {
        "rows_at_once": 2,
        "linear_rows": 64,
        "prefixes": KeptPrefixes(bytes="1MiB", block_tokens=4),
    },
}


def what_modules_have(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By module and attribute: how much is in it where it is a dictionary, as hooks are."""
    return {
        name: {
            attribute: len(value) if isinstance(value, dict) else type(value).__name__
            for attribute, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


def turn_signs(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_copy_is_as_the_model_was_before_the_block(name: str) -> None:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))  # tuning asks for bandwidths
    model = make("llama")
    model.set_attn_implementation("sdpa")
    before, edited = what_modules_have(model), copy.deepcopy(model)
    turn_signs(edited)
    tokens, other_tokens = generate(model), generate(edited)
    assert not torch.equal(tokens, other_tokens)
    options = dict(OPTIONS[name])
    policies = options.pop("policies", ALL)
    with offload(model, policies, session=session, **options):
        twin = copy.deepcopy(model)
        assert what_modules_have(twin) == before
        assert twin.config._attn_implementation == "sdpa"
        assert torch.equal(generate(twin), tokens)
        turn_signs(twin)
        assert torch.equal(generate(twin), other_tokens)
        assert torch.equal(generate(model), tokens)
    assert torch.equal(generate(twin), other_tokens)
    assert torch.equal(generate(pickle.loads(pickle.dumps(twin))), other_tokens)
    with offload(twin, ALL, session=session):
        assert torch.equal(generate(twin), other_tokens)


def test_copy_of_a_layer_whose_rows_are_in_parts_computes_with_its_own_weights(
    session: Session,
) -> None:
    model = make("llama")
    given = {"rows_at_once": 2}
    with offload(model, ALL, session=session, **given):
        layer = copy.deepcopy(model.model.layers[0])
        other = model.model.layers[0]
        with torch.no_grad():
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
            states = torch.randn(4, 3, model.config.hidden_size)
            positions = torch.arange(3)[None]
            rotary = model.model.rotary_emb(states, positions)
            options = {"position_embeddings": rotary, "position_ids": positions}
            assert torch.equal(layer(states, **options), states)
            assert not torch.equal(other(states, **options), states)
    with torch.no_grad():
        assert torch.equal(layer(states, **options), states)


def test_what_was_put_into_the_model_by_others_is_copied(session: Session) -> None:
    model = make("llama")
    seen: list[nn.Module] = []
    layer = model.model.layers[0]
    layer.mlp.forward = type(layer.mlp).forward.__get__(layer.mlp)
    with offload(model, ALL, session=session, rows_at_once=2, linear_rows=64):
        model.register_forward_pre_hook(lambda module, _: seen.append(module))
        layer.mlp.act_fn.note = "mine"
        twin = copy.deepcopy(model)
    generate(twin)
    assert set(seen) == {twin}
    assert twin.model.layers[0].mlp.act_fn.note == "mine"
    assert twin.model.layers[0].mlp.forward.__self__ is twin.model.layers[0].mlp


def test_model_that_computes_on_an_accelerator_is_not_copied_in_its_block(
    driver: _C.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    model = make("llama")
    with (
        pinning_session(machine(), driver) as session,
        offload(model, ALL, session=session, accelerator="cuda"),
        pytest.raises(ConfigError, match="cannot be copied in its offload"),
    ):
        copy.deepcopy(model)
    assert torch.equal(generate(copy.deepcopy(model)), generate(model))
