"""Current decoders from their ``config.json``, and how their checkpoints are quantised."""

from __future__ import annotations

from dataclasses import replace

from cxl_offload.files import Field
from cxl_offload.plan.model.config import ModelConfig, Quantization
from cxl_offload.plan.model.decoder import DecoderTraits, Experts, Latent
from cxl_offload.plan.model.reader import ConfigReader

DECODERS: dict[str, DecoderTraits] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "phi3", "gemma", "granite", "smollm3"),
        DecoderTraits(),
    ),
    "qwen3": DecoderTraits(query_norms="head"),
    "mixtral": DecoderTraits(),
    "qwen2_moe": DecoderTraits(),
    "qwen3_moe": DecoderTraits(query_norms="head"),
    "gemma2": DecoderTraits(norms=4),
    "gemma3_text": DecoderTraits(norms=4, query_norms="head"),
    "phi": DecoderTraits(
        norms=1, norm_width=2, gated=False, output_bias=True, mlp_bias=True, head_bias=True
    ),
    "olmo2": DecoderTraits(query_norms="all"),
    "starcoder2": DecoderTraits(norm_width=2, gated=False, output_bias=True, mlp_bias=True),
    "glm4": DecoderTraits(norms=4),
    "deepseek_v2": DecoderTraits(),
    "deepseek_v3": DecoderTraits(),
    "gpt_oss": DecoderTraits(output_bias=True, sinks=True),
}
"""``model_type`` to what is different from LLaMA, as far as no key of the file says it."""

_TIED = ("gemma", "gemma2", "gemma3_text", "starcoder2", "smollm3")
_BIASED = ("qwen2", "qwen2_moe", "phi", "starcoder2", "gpt_oss")
"""Families whose word embedding is the output layer, and whose queries, keys and values have a
bias, where the file does not say otherwise."""

_MIXTURES = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Families with experts, and how their files call the number of them."""

_SCALE_BITS = 16
"""A scale of a group of weights is in half precision; its zero point has the weights' bits."""


def read_decoder(r: ConfigReader) -> ModelConfig:
    """A decoder of :data:`DECODERS`."""
    hidden, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    kv_heads = r.whole("num_key_value_heads", heads)
    if r.has("num_key_value_heads"):
        r.divides("num_key_value_heads", kv_heads, heads, "num_attention_heads")
    if r.has("head_dim"):
        head_dim = r.whole("head_dim")
    else:
        head_dim = r.divides("num_attention_heads", heads, hidden, "hidden_size")
    traits, layers = _traits(r), r.whole("num_hidden_layers")
    experts = traits.experts
    window, windowed = _window(r, layers)
    moe_ffn = r.whole("moe_intermediate_size") if r.has("moe_intermediate_size") else None
    return ModelConfig(
        name=r.name,
        family=r.family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=moe_ffn if experts is not None and moe_ffn else r.whole("intermediate_size"),
        vocab=r.whole("vocab_size"),
        positions=r.whole("max_position_embeddings"),
        embed_dim=hidden,
        tied=r.flag("tie_word_embeddings", r.family in _TIED),
        attention_bias=_attention_bias(r),
        experts=experts.count if experts is not None else 1,
        experts_per_token=experts.per_token if experts is not None else 1,
        activation=r.word("hidden_act", "silu"),
        decoder=traits,
        window=window,
        windowed_layers=windowed,
    )


def _attention_bias(r: ConfigReader) -> bool:
    if r.family == "starcoder2":
        return r.flag("use_bias", True)
    return r.flag("attention_bias", r.family in _BIASED) or r.family in ("qwen2", "phi")


def _traits(r: ConfigReader) -> DecoderTraits:
    traits = DECODERS[r.family]
    if r.family in ("llama", "granite"):
        traits = replace(traits, output_bias=r.flag("attention_bias", False))
    if r.family in ("llama", "granite") and r.flag("mlp_bias", False):
        traits = replace(traits, mlp_bias=True)
    if r.family.startswith("deepseek"):
        latent = Latent(
            kv_rank=r.whole("kv_lora_rank"),
            query_rank=r.whole("q_lora_rank") if r.has("q_lora_rank") else 0,
            nope=r.whole("qk_nope_head_dim"),
            rope=r.whole("qk_rope_head_dim"),
            value=r.whole("v_head_dim"),
        )
        traits = replace(traits, latent=latent)
    return replace(traits, experts=_experts(r))


def _experts(r: ConfigReader) -> Experts | None:
    if r.family not in _MIXTURES:
        return None
    key = next((key for key in _EXPERT_COUNTS if r.has(key)), None)
    if key is None:
        r.document.fail(f"none of the keys {', '.join(_EXPERT_COUNTS)}")
    count, per_token = r.whole(key), r.whole("num_experts_per_tok")
    if per_token > count:
        r.entries["num_experts_per_tok"].fail(f"{per_token} of {count} experts")
    if r.family.startswith("deepseek"):
        dense = r.count("first_k_dense_replace")
        shared = r.count("n_shared_experts") * r.whole("moe_intermediate_size")
        return Experts(
            count=count,
            per_token=per_token,
            shared=shared,
            dense_layers=dense,
            dense_ffn=r.whole("intermediate_size"),
        )
    shared = r.whole("shared_expert_intermediate_size") if r.family == "qwen2_moe" else 0
    return Experts(
        count=count,
        per_token=per_token,
        shared=shared,
        shared_gate=shared > 0,
        biases=r.family == "gpt_oss",
    )


def _window(r: ConfigReader, layers: int) -> tuple[int, int]:
    """Tokens that windowed attention looks back at, and how many layers have it."""
    if not r.has("sliding_window") or not r.flag("use_sliding_window", True):
        return 0, 0
    window = r.whole("sliding_window")
    if r.has("layer_types"):
        kinds = [each.text() for each in r.entries["layer_types"].items()]
        return window, sum(kind == "sliding_attention" for kind in kinds)
    if r.family == "gemma2":
        return window, (layers + 1) // 2
    if r.family == "gpt_oss":
        return window, (layers + 1) // 2
    if r.family == "gemma3_text":
        pattern = r.whole("sliding_window_pattern", 6)
        return window, layers - layers // pattern
    if r.has("max_window_layers"):
        return window, max(0, layers - r.whole("max_window_layers"))
    return window, layers


def quantization(field: Field) -> Quantization:
    """What ``quantization_config`` says.

    Raises
    ------
    ConfigError
        A method whose bytes are not known; with file and line.
    """
    entries = field.entries()
    if "quant_method" not in entries:
        field.fail("key 'quant_method' is missing")
    method = entries["quant_method"].text()
    if method in ("awq", "gptq"):
        key = next((key for key in ("bits", "w_bit") if key in entries), None)
        bits = 4 if key is None else entries[key].integer(minimum=1)
        group = entries["group_size"].value() if "group_size" in entries else 128
        extra = (_SCALE_BITS + bits) / group if isinstance(group, int) and group > 0 else 0.0
        return Quantization(method, bits + extra)
    if method in ("fp8", "fbgemm_fp8"):
        return Quantization(method, 8.0)
    if method == "mxfp4":
        return Quantization(method, 4.25, experts_only=True)
    if method == "bitsandbytes":
        four = "load_in_4bit" in entries and entries["load_in_4bit"].boolean()
        return Quantization(method, 4.5 if four else 8.0)
    if method == "compressed-tensors" and "config_groups" in entries:
        first = next(iter(entries["config_groups"].entries().values()))
        weights = first.entries()["weights"].entries()
        return Quantization(method, float(weights["num_bits"].integer(minimum=1)))
    entries["quant_method"].fail(
        f"{method!r}: its bytes are not known; known are awq, gptq, fp8, mxfp4, bitsandbytes and "
        "compressed-tensors"
    )
