"""Shapes of a model: every weight, KV and arithmetic a token.

OPT, GPT-2, BERT, LLaMA, Mistral, Qwen2, Qwen3 and Mixtral. Shapes are those of the transformers
library's modules of the same ``model_type``. Quantised checkpoints count as the elements they
stand for. ``model.file`` reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "Family",
    "ModelConfig",
    "TensorKind",
    "WeightKind",
]

Family = Literal["opt", "gpt2", "bert", "llama", "mistral", "qwen2", "qwen3", "mixtral"]
WeightKind = Literal["embedding", "attention", "mlp", "norm", "router", "head"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """``count`` weights of one shape, such as the query projections of all layers."""

    kind: WeightKind
    name: str
    shape: tuple[int, ...]
    count: int

    @property
    def elements(self) -> int:
        """Numbers in all of them."""
        return math.prod(self.shape) * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A transformer's sizes.

    Attributes
    ----------
    head_dim
        Elements of a head; ``heads * head_dim`` may differ from ``hidden``.
    ffn
        Width of the MLP, of one expert where there are several.
    embed_dim
        Width of the word embedding; other than ``hidden`` only in OPT-350M.
    tied
        The output layer is the word embedding.
    experts, experts_per_token
        1 and 1 for a dense model.
    final_norm
        A layer norm after the last layer (OPT only says no).
    activation
        As ``config.json`` names it.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    embed_dim: int
    tied: bool
    attention_bias: bool = False
    experts: int = 1
    experts_per_token: int = 1
    final_norm: bool = True
    norm_first: bool = True
    activation: str = ""
    token_types: int = 0

    def tensors(self) -> tuple[TensorKind, ...]:
        """Every weight by kind and shape."""
        if self.family == "opt":
            return _opt(self)
        if self.family == "gpt2":
            return _gpt2(self)
        return _bert(self) if self.family == "bert" else _llama(self)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def active_parameters(self) -> int:
        """Numbers that one token meets: of the experts only its own."""
        shared = sum(t.elements for t in self.tensors() if t.kind != "mlp")
        mlp = sum(t.elements for t in self.tensors() if t.kind == "mlp")
        return shared + mlp * self.experts_per_token // self.experts

    @property
    def generates(self) -> bool:
        """Whether it is a decoder that keeps K and V."""
        return self.family != "bert"

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token over all layers; 0 for an encoder."""
        return 2 * self.layers * self.kv_heads * self.head_dim if self.generates else 0

    def kv_bytes_per_token(self, element_bytes: float = 2) -> float:
        """The same in bytes."""
        return self.kv_elements_per_token * element_bytes

    def weight_bytes(self, element_bytes: float = 2) -> dict[WeightKind, float]:
        """Bytes of the weights by kind."""
        kinds: dict[WeightKind, float] = dict.fromkeys(get_args(WeightKind), 0.0)
        for tensor in self.tensors():
            kinds[tensor.kind] += tensor.elements * element_bytes
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def forward_flops(self, *, tokens: int, context: float) -> float:
        """Operations of ``tokens`` tokens that each attend to ``context`` tokens.

        Two a parameter met, embeddings looked up left out, and four a token, context token and
        element of the heads. Source: Kaplan et al., Scaling Laws for Neural Language Models, 2.1.
        """
        looked_up = 0 if self.tied else self.vocab * self.embed_dim
        tables = self.positions * self.hidden if self.family in ("opt", "gpt2", "bert") else 0
        products = 2.0 * (self.active_parameters - looked_up - tables) * tokens
        return products + 4.0 * tokens * context * self.layers * self.heads * self.head_dim


def _each(layers: int, *parts: tuple[WeightKind, str, tuple[int, ...]]) -> list[TensorKind]:
    return [TensorKind(kind, name, shape, layers) for kind, name, shape in parts]


def _once(kind: WeightKind, name: str, *shape: int) -> TensorKind:
    return TensorKind(kind, name, shape, 1)


def _opt(c: ModelConfig) -> tuple[TensorKind, ...]:
    h, ffn = c.hidden, c.ffn
    made = [
        _once("embedding", "embed_tokens", c.vocab, c.embed_dim),
        _once("embedding", "embed_positions", c.positions + 2, h),
    ]
    if c.embed_dim != h:
        made.append(_once("embedding", "project_in", h, c.embed_dim))
        made.append(_once("head", "project_out", c.embed_dim, h))
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        made += _each(c.layers, ("attention", name, (h, h)), ("attention", name + ".bias", (h,)))
    made += _each(
        c.layers,
        ("norm", "self_attn_layer_norm", (2, h)),
        ("mlp", "fc1", (ffn, h)),
        ("mlp", "fc1.bias", (ffn,)),
        ("mlp", "fc2", (h, ffn)),
        ("mlp", "fc2.bias", (h,)),
        ("norm", "final_layer_norm", (2, h)),
    )
    if c.final_norm:
        made.append(_once("norm", "layer_norm", 2, h))
    return tuple(made)


def _gpt2(c: ModelConfig) -> tuple[TensorKind, ...]:
    h, ffn = c.hidden, c.ffn
    layers = _each(
        c.layers,
        ("norm", "ln_1", (2, h)),
        ("attention", "c_attn", (h, 3 * h)),
        ("attention", "c_attn.bias", (3 * h,)),
        ("attention", "c_proj", (h, h)),
        ("attention", "c_proj.bias", (h,)),
        ("norm", "ln_2", (2, h)),
        ("mlp", "c_fc", (h, ffn)),
        ("mlp", "c_fc.bias", (ffn,)),
        ("mlp", "mlp.c_proj", (ffn, h)),
        ("mlp", "mlp.c_proj.bias", (h,)),
    )
    return (
        _once("embedding", "wte", c.vocab, h),
        _once("embedding", "wpe", c.positions, h),
        *layers,
        _once("norm", "ln_f", 2, h),
        *([] if c.tied else [_once("head", "lm_head", c.vocab, h)]),
    )


def _bert(c: ModelConfig) -> tuple[TensorKind, ...]:
    h, ffn = c.hidden, c.ffn
    made = [
        _once("embedding", "word_embeddings", c.vocab, h),
        _once("embedding", "position_embeddings", c.positions, h),
        _once("embedding", "token_type_embeddings", c.token_types, h),
        _once("norm", "embeddings.LayerNorm", 2, h),
    ]
    for name in ("query", "key", "value", "output.dense"):
        made += _each(c.layers, ("attention", name, (h, h)), ("attention", name + ".bias", (h,)))
    made += _each(
        c.layers,
        ("norm", "attention.LayerNorm", (2, h)),
        ("mlp", "intermediate", (ffn, h)),
        ("mlp", "intermediate.bias", (ffn,)),
        ("mlp", "output", (h, ffn)),
        ("mlp", "output.bias", (h,)),
        ("norm", "output.LayerNorm", (2, h)),
    )
    return (*made, _once("head", "pooler", h, h), _once("head", "pooler.bias", h))


def _llama(c: ModelConfig) -> tuple[TensorKind, ...]:
    h, ffn, q, kv = c.hidden, c.ffn, c.heads * c.head_dim, c.kv_heads * c.head_dim
    made = [_once("embedding", "embed_tokens", c.vocab, h)]
    attention: list[tuple[WeightKind, str, tuple[int, ...]]] = [
        ("attention", "q_proj", (q, h)),
        ("attention", "k_proj", (kv, h)),
        ("attention", "v_proj", (kv, h)),
        ("attention", "o_proj", (h, q)),
    ]
    if c.attention_bias:
        attention += [("attention", "q_proj.bias", (q,)), ("attention", "k_proj.bias", (kv,))]
        attention += [("attention", "v_proj.bias", (kv,))]
        if c.family == "llama":
            attention += [("attention", "o_proj.bias", (h,))]
    if c.family == "qwen3":
        attention += [("norm", "q_norm", (c.head_dim,)), ("norm", "k_norm", (c.head_dim,))]
    made += _each(c.layers, *attention)
    if c.experts > 1:
        made += _each(c.layers, ("router", "gate", (c.experts, h)))
    for name, shape in (("gate_proj", (ffn, h)), ("up_proj", (ffn, h)), ("down_proj", (h, ffn))):
        made.append(TensorKind("mlp", name, shape, c.layers * c.experts))
    made += _each(
        c.layers, ("norm", "input_layernorm", (h,)), ("norm", "post_attention_layernorm", (h,))
    )
    made.append(_once("norm", "norm", h))
    if not c.tied:
        made.append(_once("head", "lm_head", c.vocab, h))
    return tuple(made)
