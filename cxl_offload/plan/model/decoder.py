"""Weights of current decoders: LLaMA, and what each of its descendants does otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

WeightKind = Literal["embedding", "attention", "mlp", "norm", "router", "head"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """``count`` weights of one shape, such as the query projections of all layers.

    ``met`` is the share of them that one token meets: below 1 for experts.
    """

    kind: WeightKind
    name: str
    shape: tuple[int, ...]
    count: int
    met: float = 1.0

    @property
    def elements(self) -> int:
        """Numbers in all of them."""
        return math.prod(self.shape) * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: ``shared`` is the width of what every token meets beside its own.

    The first ``dense_layers`` have one MLP of width ``dense_ffn`` instead.
    """

    count: int
    per_token: int
    shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0
    biases: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: K and V are kept as one vector of rank ``kv_rank``."""

    kv_rank: int
    query_rank: int
    nope: int
    rope: int
    value: int

    @property
    def cached(self) -> int:
        """Elements of a token's cache in one layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """What makes a decoder different from LLaMA.

    Attributes
    ----------
    norms
        Norms of one layer.
    norm_width
        Vectors of a norm: 2 with a bias, 0 without any weight.
    query_norms
        ``head``: one for the queries and one for the keys of a head; ``all``: over all heads.
    output_bias, mlp_bias, head_bias
        Biases, beside those of queries, keys and values.
    sinks
        One number a head that softmax sees too.
    """

    norms: int = 2
    norm_width: int = 1
    query_norms: Literal["", "head", "all"] = ""
    gated: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sinks: bool = False
    experts: Experts | None = None
    latent: Latent | None = None


class DecoderSizes(Protocol):
    """What the shapes follow from."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...


def decoder_tensors(c: DecoderSizes, traits: DecoderTraits) -> tuple[TensorKind, ...]:
    """Every weight by kind and shape."""
    norm = (traits.norm_width, c.hidden) if traits.norm_width > 1 else (c.hidden,)
    made = [TensorKind("embedding", "embed_tokens", (c.vocab, c.hidden), 1)]
    made += _latent(c, traits.latent) if traits.latent is not None else _attention(c, traits)
    if traits.experts is None:
        made += _mlp(c, traits, c.ffn, c.layers, "")
    else:
        made += _experts(c, traits, traits.experts)
    if traits.norm_width:
        made += [TensorKind("norm", f"norm {at}", norm, c.layers) for at in range(traits.norms)]
        made.append(TensorKind("norm", "norm", norm, 1))
    if not c.tied:
        made.append(TensorKind("head", "lm_head", (c.vocab, c.hidden), 1))
        if traits.head_bias:
            made.append(TensorKind("head", "lm_head.bias", (c.vocab,), 1))
    return tuple(made)


def _attention(c: DecoderSizes, traits: DecoderTraits) -> Iterator[TensorKind]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    for name, width in parts.items():
        yield TensorKind("attention", name, (width, c.hidden), c.layers)
        if c.attention_bias:
            yield TensorKind("attention", f"{name}.bias", (width,), c.layers)
    yield TensorKind("attention", "o_proj", (c.hidden, q), c.layers)
    if traits.output_bias:
        yield TensorKind("attention", "o_proj.bias", (c.hidden,), c.layers)
    if traits.sinks:
        yield TensorKind("attention", "sinks", (c.heads,), c.layers)
    if traits.query_norms:
        whole = traits.query_norms == "all"
        for name, width in (("q_norm", q), ("k_norm", kv)):
            yield TensorKind("norm", name, (width if whole else c.head_dim,), c.layers)


def _latent(c: DecoderSizes, latent: Latent) -> Iterator[TensorKind]:
    query = c.heads * (latent.nope + latent.rope)
    if latent.query_rank:
        yield TensorKind("attention", "q_a_proj", (latent.query_rank, c.hidden), c.layers)
        yield TensorKind("norm", "q_a_layernorm", (latent.query_rank,), c.layers)
        yield TensorKind("attention", "q_b_proj", (query, latent.query_rank), c.layers)
    else:
        yield TensorKind("attention", "q_proj", (query, c.hidden), c.layers)
    yield TensorKind("attention", "kv_a_proj", (latent.cached, c.hidden), c.layers)
    yield TensorKind("norm", "kv_a_layernorm", (latent.kv_rank,), c.layers)
    up = c.heads * (latent.nope + latent.value)
    yield TensorKind("attention", "kv_b_proj", (up, latent.kv_rank), c.layers)
    yield TensorKind("attention", "o_proj", (c.hidden, c.heads * latent.value), c.layers)


def _mlp(
    c: DecoderSizes, traits: DecoderTraits, width: int, count: int, prefix: str, met: float = 1.0
) -> Iterator[TensorKind]:
    inner = ("gate_proj", "up_proj") if traits.gated else ("up_proj",)
    for name in inner:
        yield TensorKind("mlp", prefix + name, (width, c.hidden), count, met)
    yield TensorKind("mlp", f"{prefix}down_proj", (c.hidden, width), count, met)
    biases = traits.mlp_bias or (traits.experts is not None and traits.experts.biases)
    if biases:
        for name in inner:
            yield TensorKind("mlp", f"{prefix}{name}.bias", (width,), count, met)
        yield TensorKind("mlp", f"{prefix}down_proj.bias", (c.hidden,), count, met)


def _experts(c: DecoderSizes, traits: DecoderTraits, experts: Experts) -> Iterator[TensorKind]:
    sparse = c.layers - experts.dense_layers
    yield TensorKind("router", "gate", (experts.count, c.hidden), sparse)
    if experts.biases:
        yield TensorKind("router", "gate.bias", (experts.count,), sparse)
    met = experts.per_token / experts.count
    yield from _mlp(c, traits, c.ffn, sparse * experts.count, "", met)
    if experts.shared:
        yield from _mlp(c, traits, experts.shared, sparse, "shared ")
    if experts.shared_gate:
        yield TensorKind("router", "shared_expert_gate", (1, c.hidden), sparse)
    if experts.dense_layers:
        yield from _mlp(c, traits, experts.dense_ffn, experts.dense_layers, "dense ")
