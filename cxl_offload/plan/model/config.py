"""Shapes of a model: every weight, KV and arithmetic a token.

Shapes are those of the transformers library's modules of the same ``model_type``: of OPT, GPT-2 and
BERT here, of the current decoders in ``model.decoder``. ``model.file`` reads them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import get_args

from cxl_offload.plan.model.decoder import DecoderTraits, TensorKind, WeightKind, decoder_tensors
from cxl_offload.renamed import old_names

__all__ = [
    "ModelConfig",
    "ModelFamily",
    "Quantization",
    "TensorKind",
    "WeightKind",
]

ModelFamily = str
"""``model_type`` of a ``config.json``."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint keeps the matrices of its layers; all else is in half precision.

    ``bits`` are those of an element, scales and zero points included; ``experts_only`` leaves
    everything but the experts of a mixture in half precision.
    """

    method: str
    bits: float
    experts_only: bool = False

    def bytes_of(self, tensor: TensorKind) -> float:
        """Bytes of all tensors of a kind."""
        packed = tensor.kind in ("attention", "mlp") and len(tensor.shape) > 1
        if packed and (tensor.met < 1 or not self.experts_only):
            return tensor.elements * self.bits / 8
        return tensor.elements * 2.0


_WORDS = ("embed_tokens", "wte", "word_embeddings")
_TABLES = (*_WORDS, "embed_positions", "wpe", "position_embeddings", "token_type_embeddings")


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
    decoder
        What makes a current decoder different from LLaMA; None for OPT, GPT-2 and BERT.
    window, windowed_layers
        Tokens that attention of so many layers looks back at most; 0: all of them.
    quantization
        None: half precision.
    """

    name: str
    family: ModelFamily
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
    decoder: DecoderTraits | None = None
    window: int = 0
    windowed_layers: int = 0
    quantization: Quantization | None = None

    def tensors(self) -> tuple[TensorKind, ...]:
        """Every weight by kind and shape."""
        return _tensors(self)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(tensor.elements for tensor in self.tensors())

    @property
    def active_parameters(self) -> int:
        """Numbers that one token meets: of the experts only its own."""
        return round(sum(tensor.elements * tensor.met for tensor in self.tensors()))

    @property
    def gated(self) -> bool:
        """Whether the MLP has three matrices."""
        return self.decoder is not None and self.decoder.gated

    @property
    def multiplied_parameters(self) -> int:
        """Numbers that one token is multiplied by: without embeddings that it looks up."""
        return self.active_parameters - self.looked_up_parameters

    @property
    def looked_up_parameters(self) -> int:
        """Numbers of embeddings that are looked up only, and are not the output layer too."""
        return sum(tensor.elements for tensor in self._tables)

    def bytes_of(self, tensor: TensorKind) -> float:
        """Bytes of all tensors of a kind, as the checkpoint keeps them."""
        if self.quantization is not None:
            return self.quantization.bytes_of(tensor)
        return tensor.elements * 2.0

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of all weights, as the checkpoint keeps them."""
        return sum(self.bytes_of(tensor) for tensor in self.tensors())

    @property
    def _tables(self) -> list[TensorKind]:
        """Embeddings that tokens look up a row in; the output layer is none."""
        words = _WORDS if self.tied else ()
        return [t for t in self.tensors() if t.name in _TABLES and t.name not in words]

    @property
    def looked_up_bytes(self) -> float:
        """Bytes of the weights that a token looks up a row in, of which a step reads next to none.

        As the checkpoint keeps them.
        """
        return sum(map(self.bytes_of, self._tables))

    @property
    def generates(self) -> bool:
        """Whether it is a decoder that keeps K and V."""
        return self.family != "bert"

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token over all layers; 0 for an encoder."""
        if not self.generates:
            return 0
        if self.decoder is not None and self.decoder.latent is not None:
            return self.layers * self.decoder.latent.cached
        return 2 * self.layers * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of the cache of a sequence of so many tokens; windows forget the oldest."""
        each = self.kv_bytes_per_token() / max(1, self.layers)
        if not self.window:
            return each * self.layers * tokens
        kept = min(tokens, self.window)
        return each * ((self.layers - self.windowed_layers) * tokens + self.windowed_layers * kept)

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
        products = 2.0 * self.multiplied_parameters * tokens
        attended = context * self.layers
        if self.window:
            attended += self.windowed_layers * (min(context, self.window) - context)
        return products + 4.0 * tokens * attended * self.heads * self.head_dim


@functools.cache
def _tensors(c: ModelConfig) -> tuple[TensorKind, ...]:
    """What a search asks for thousands of times."""
    if c.family == "opt":
        return _opt(c)
    if c.family == "gpt2":
        return _gpt2(c)
    return _bert(c) if c.decoder is None else decoder_tensors(c, c.decoder)


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
    if not c.tied:
        made.append(_once("head", "lm_head", c.vocab, c.embed_dim))
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


__getattr__ = old_names(__name__)
