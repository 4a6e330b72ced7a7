"""Decoders that nobody here looked at one by one: by transformers' conventions, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import PAD, VOCAB, WINDOW, generate

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
LAYERS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}

BY_CONVENTION = [
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "cwm",
    "diffllama",
    "doge",
    "ernie4_5",
    "exaone4",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "jais2",
    "jetmoe",
    "lfm2",
    "llama4_text",
    "ministral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "persimmon",
    "phimoe",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
]


def make(name: str, **more: Any) -> PreTrainedModel:
    """With wide weights, so that attention chooses and does not average."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**SHAPE, **more})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", BY_CONVENTION)
def test_architecture_gives_the_tokens_of_stock(name: str, session: Session) -> None:
    model = make(name)
    stock = generate(model, "sdpa")
    assert len(stock[:, 20:].unique()) > 12  # the tokens say something
    with offload(model, POLICIES, session=session) as done:
        assert torch.equal(generate(model), stock)
        assert done.calls.kernel >= 9 * LAYERS
        assert not done.calls.own
        assert torch.equal(generate(model, cache_implementation="static"), stock)
    assert torch.equal(generate(model, "sdpa"), stock)


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu"])
def test_latent_attention_gives_the_tokens_of_stock(name: str, session: Session) -> None:
    """Their keys are wider than their values, so the model's own attention reads the tier."""
    model = make(name, **LATENT)
    stock = generate(model, "sdpa")
    assert len(stock[:, 20:].unique()) > 12
    with offload(model, POLICIES, session=session) as done:
        assert torch.equal(generate(model), stock)
        assert done.calls.own == {"keys and values of different widths": 9 * LAYERS}


def test_states_of_fixed_size_beside_attention_give_the_tokens_of_stock(session: Session) -> None:
    """Such a state is no KV: it stays where transformers has it, and the weights are placed."""
    model = make("recurrent_gemma")
    stock = generate(model, "sdpa")
    with offload(model, POLICIES, session=session):
        assert torch.equal(generate(model), stock)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("biogpt", "computes its attention itself"),
        ("falcon_h1", "computes its attention itself"),
        ("mpt", "computes its attention itself"),
        ("stablelm", "computes its attention itself"),
        ("xglm", "computes its attention itself"),
        ("minimax", "a cache of its own"),
    ],
)
def test_architecture_against_the_conventions_is_refused_in_one_line(
    name: str, why: str, session: Session
) -> None:
    model = make(name)
    with pytest.raises(ConfigError, match=why) as caught:
        offload(model, POLICIES, session=session)
    assert type(model).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
