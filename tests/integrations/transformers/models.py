"""Tiny decoders with random weights, one of each family, and prompts for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

VOCAB = 256
PAD = 1
WINDOW = 12
"""Shorter than the prompts: that a window slides is seen in every token."""

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_GATED = {**_SHAPE, "intermediate_size": 96, "pad_token_id": PAD, "bos_token_id": 0}
_GROUPED = {**_GATED, "num_key_value_heads": 2}
_OPT = {**_SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64}
_GEMMA = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_QWEN2 = {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OSS = {**_GROUPED, "head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 4}
_OSS |= {"intermediate_size": 64, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_GPT2["tie_word_embeddings"] = False

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "opt": lambda: OPTForCausalLM(OPTConfig(**_OPT)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_QWEN2)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=32)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_GEMMA, attn_logit_softcapping=1.0)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA, sliding_window_pattern=2)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**_GATED)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_GATED, sliding_window=WINDOW)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**_OSS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_GROUPED, num_local_experts=4)),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**_GROUPED, **_EXPERTS, shared_expert_intermediate_size=32)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_GROUPED, **_EXPERTS)),
}

ONLY_EAGER = ("gemma2", "gpt-oss")
"""Families whose attention sdpa does not compute: it drops soft caps, and refuses sinks."""

ALIKE = tuple(name for name in FAMILIES if name not in ONLY_EAGER)
"""Families whose eager and sdpa attention compute the same."""


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose attention matters: see :func:`choosing`."""
    torch.manual_seed(3)
    return choosing(FAMILIES[family]()).to(dtype)


def choosing(model: PreTrainedModel) -> PreTrainedModel:
    """Wide weights make its attention choose, not average; generation does not end early."""
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def prompts(rows: int = 4, length: int = 20) -> dict[str, torch.Tensor]:
    """Token ids and their mask, two rows padded on the left."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in ((0, 7), (1, 15)):
        if row < rows:
            mask[row, :padding] = 0
            ids[row, :padding] = PAD
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: PreTrainedModel, attention: str | None = None, **options: Any) -> torch.Tensor:
    """Tokens for :func:`prompts`, 10 new ones, with one of the model's own attentions or as it is.

    The likeliest token always, but rather a new one: small models like to say the same again.
    """
    if attention is not None:
        model.set_attn_implementation(attention)
    given: dict[str, Any] = {
        **prompts(),
        "max_new_tokens": 10,
        "do_sample": False,
        "repetition_penalty": 1.5,
    }
    given |= options
    made = model.generate(**given)
    return made  # type: ignore[no-any-return]


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, everything computed in double precision by the formula."""
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("by_formula")
    if hasattr(exact.config, "num_experts_per_tok"):
        exact.set_experts_implementation("eager")  # the others have no double precision
    return exact


def by_formula(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention computes, step by step."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        sinks = s_aux.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1).nan_to_num()[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


def _whole_mask(**given: Any) -> torch.Tensor:
    made = sdpa_mask(**{**given, "allow_is_causal_skip": False})
    assert isinstance(made, torch.Tensor)
    return made


AttentionInterface.register("by_formula", by_formula)
AttentionMaskInterface.register("by_formula", _whole_mask)
