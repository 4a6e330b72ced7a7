"""Shapes against published parameter counts, and against transformers' own modules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.model.file import load_model, model_names, parse_model

# Counts on the models' pages (safetensors metadata) and of their papers.
PARAMETERS = {
    "bert-base-uncased": 109_482_240,
    "bert-large-uncased": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-14b": 14_768_307_200,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
}

SMALL: dict[str, dict[str, Any]] = {
    "opt": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "ffn_dim": 160,
        "vocab_size": 99,
        "max_position_embeddings": 40,
        "word_embed_proj_dim": 32,
    },
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 99, "n_positions": 40},
    "bert": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "vocab_size": 99,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "type_vocab_size": 3,
    },
    "llama": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "head_dim": 16,
    },
    "qwen2": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "num_hidden_layers": 3,
        "intermediate_size": 160,
        "max_position_embeddings": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
_DECODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_MIXTURE = {**_DECODER, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    **_DECODER,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
SMALL |= {
    **dict.fromkeys(("phi", "phi3", "olmo2", "granite", "smollm3", "starcoder2"), _DECODER),
    **{key: {**_DECODER, "head_dim": 16} for key in ("gemma", "gemma2", "gemma3_text", "glm4")},
    "qwen2_moe": {**_MIXTURE, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_MIXTURE, "head_dim": 12},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gpt_oss": {**_DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_of_published_models(name: str) -> None:
    assert load_model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("family", sorted(SMALL))
def test_parameters_are_those_of_the_transformers_module(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    raw = SMALL[family]
    config = transformers.AutoConfig.for_model(family, **raw)
    config.save_pretrained(tmp_path)
    plain = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = plain.from_config(config)
    theirs = sum(math.prod(each.shape) for each in module.parameters())
    if family in ("opt", "gpt2") and not getattr(config, "tie_word_embeddings", True):
        theirs -= raw["vocab_size"] * 32

    model = load_model(tmp_path)

    assert model.parameters == theirs
    assert model.family == family


def test_kv_bytes_follow_grouped_heads() -> None:
    assert load_model("llama-3-70b").kv_bytes_per_token() == 0.3125 * 2**20
    assert load_model("opt-175b").kv_bytes_per_token() == 2 * 96 * 12288 * 2
    assert load_model("bert-base-uncased").kv_bytes_per_token() == 0


def test_mixture_meets_two_of_eight_experts() -> None:
    model = load_model("mixtral-8x7b")
    assert model.active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert sum(model.weight_bytes().values()) == 2 * model.parameters


QUANTIZED = {
    "awq": ({"bits": 4, "group_size": 128}, 4 + 20 / 128),
    "gptq": ({"bits": 8, "group_size": -1}, 8),
    "fp8": ({}, 8),
    "bitsandbytes": ({"load_in_4bit": True}, 4.5),
    "compressed-tensors": ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 4),
}


@pytest.mark.parametrize("method", sorted(QUANTIZED))
def test_quantised_checkpoints_count_as_they_are_kept(method: str) -> None:
    raw, bits = QUANTIZED[method]
    plain = parse_model(json.dumps(BASE), name="x", file="config.json")
    packed = parse_model(
        json.dumps({**BASE, "quantization_config": {"quant_method": method, **raw}}),
        name="x",
        file="config.json",
    )
    inside = sum(
        t.elements for t in plain.tensors() if t.kind in ("attention", "mlp") and len(t.shape) > 1
    )
    rest = plain.parameters - inside
    assert packed.checkpoint_bytes == pytest.approx(inside * bits / 8 + 2 * rest)
    assert plain.checkpoint_bytes == 2 * plain.parameters


def test_unknown_quantisation_is_refused_with_its_line() -> None:
    raw = {**BASE, "quantization_config": {"quant_method": "rot13"}}
    with pytest.raises(ConfigError, match="'rot13': its bytes are not known"):
        parse_model(json.dumps(raw, indent=1), name="x", file="config.json")


def test_windows_bound_the_cache_of_their_layers() -> None:
    raw = {**BASE, "model_type": "gemma2", "head_dim": 8, "sliding_window": 10}
    model = parse_model(json.dumps(raw), name="x", file="config.json")
    each = 2 * 2 * 8 * 8  # bytes of a token in one layer
    assert model.kv_bytes(6) == 2 * 6 * each
    assert model.kv_bytes(30) == (30 + 10) * each
    off = parse_model(
        json.dumps({**raw, "model_type": "qwen2", "use_sliding_window": False}),
        name="x",
        file="config.json",
    )
    assert off.kv_bytes(30) == 2 * 30 * each


def test_every_shipped_model_loads_with_a_source() -> None:
    assert len(model_names()) >= 20
    for name in model_names():
        assert load_model(name).name == name


BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 10,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        ({"hidden_size": "64 GiB"}, 3, "hidden_size: must be a whole number, not '64 GiB'"),
        ({"hidden_size": 65}, 4, "65 of hidden_size is no multiple of 8"),
        ({"num_hidden_layers": 0}, 5, "must be at least 1"),
        ({"vocab_size": None}, 1, "key 'vocab_size' is missing"),
        ({"model_type": "t5"}, 2, "'t5' is unknown"),
    ],
)
def test_wrong_configuration_is_named_with_its_line(
    change: dict[str, object], line: int, message: str
) -> None:
    raw = {key: value for key, value in {**BASE, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=message) as caught:
        parse_model(json.dumps(raw, indent=1), name="x", file="config.json")
    assert (caught.value.file, caught.value.line) == ("config.json", line)


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known: .*opt-175b"):
        load_model("opt-9b")


def test_tables_are_looked_up_and_the_output_layer_is_not() -> None:
    llama, gpt2 = load_model("llama-2-7b"), load_model("gpt2")
    assert llama.looked_up_bytes == 2 * 32000 * 4096
    assert gpt2.looked_up_bytes == 2 * 1024 * 768  # positions; words are the output layer
    assert load_model("opt-350m").looked_up_bytes == 2 * 2050 * 1024
