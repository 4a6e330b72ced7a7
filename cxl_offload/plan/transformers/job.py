"""A decoder of transformers with its lengths: bytes by kind of weight, and what a token meets."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from cxl_offload.plan.decoding.engine import TRANSFORMERS, EngineRates, RowCosts
from cxl_offload.plan.equations.experts import asked_share
from cxl_offload.plan.equations.row_states import states_bytes
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.model.decoder import TensorKind
from cxl_offload.plan.request import check_lengths

EXPERTS = "experts"
"""The kind of which a pass reads what its tokens ask for."""

HEAD = "head"
"""The kind that is in no layer, and is streamed by itself."""

EMBEDDING = "embedding"
"""The kind of which a token reads one row: nothing is gained where it is fast."""

_ID_BYTES = 8
"""Of a token's id: torch's own whole numbers."""

_LAYER_SLICE = 1.5
"""Hidden states of a prompt that a layer holds at a time beside the next ones, over the widths of
its attention and MLP: inputs and outputs of a product, and half of one that is freed late.
Assumed."""


@dataclass(frozen=True, slots=True)
class KindSize:
    """All weights of one kind: bytes, and numbers that a token is multiplied by."""

    bytes: int
    met: float


@dataclass(frozen=True, kw_only=True)
class DecoderJob:
    """One model with its prompt and answer lengths, in half precision.

    Attributes
    ----------
    kinds
        Sizes by kind, as the integration calls them.
    kv_dtype
        What keys and values are kept as on the host, one of :data:`KV_TYPES`; None: as computed.
    """

    model: ModelConfig
    kinds: Mapping[str, KindSize]
    prompt: int
    generated: int
    engine: EngineRates = TRANSFORMERS
    kv_dtype: str | None = None

    @functools.cached_property
    def params(self) -> float:
        """Numbers in the weights that one token is multiplied by."""
        return sum(kind.met for kind in self.kinds.values())

    @functools.cached_property
    def last_params(self) -> float:
        """The head: generate() asks for the logits of a prompt's last token only."""
        return self.kinds[HEAD].met if HEAD in self.kinds else 0.0

    @property
    def layers(self) -> int:
        """Layers."""
        return self.model.layers

    @property
    def width(self) -> int:
        """Elements of a token between layers."""
        return self.model.hidden

    @functools.cached_property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return self.model.heads * self.model.head_dim

    @functools.cached_property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(kind.bytes for kind in self.kinds.values())

    @functools.cached_property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token over all layers."""
        return self.model.kv_bytes_per_token() * self._kv_share

    @property
    def _kv_share(self) -> float:
        """Bytes of the cache over those in half precision."""
        if self.kv_dtype is None:
            return 1.0
        dim = self.model.head_dim
        return KV_TYPES[self.kv_dtype].row_bytes(dim) / (2 * dim)

    @functools.cached_property
    def kv_elements_per_token(self) -> float:
        """Numbers in them."""
        return self.model.kv_elements_per_token

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element between layers: half precision."""
        return 2.0

    @functools.cached_property
    def mean_kv_tokens(self) -> float:
        """Positions that a decode step attends to, in the mean over steps and layers."""
        return self._kept(self.prompt + self.generated / 2)

    @functools.cached_property
    def kv_sequence_bytes(self) -> float:
        """The cache of one sequence when it is longest."""
        return self.model.kv_bytes(self.prompt + self.generated) * self._kv_share

    def _kept(self, tokens: float) -> float:
        return self.model.kv_bytes(tokens) / self.model.kv_bytes_per_token()

    def row_s(self, costs: RowCosts) -> float:
        """Seconds of one token's row between the products of all layers."""
        model = self.model
        keys = model.kv_heads * model.head_dim
        layer = costs.norm * self.width + costs.attention * keys
        if model.decoder is not None:  # OPT, GPT-2 and BERT know positions from an embedding
            layer += costs.rotary * (self.query_width + keys)
        inner = model.ffn * model.experts_per_token
        layer += costs.gate * inner * (1.0 if model.gated else 0.5)
        return self.layers * layer + costs.logits * model.vocab

    def layer_kv_as_float(self, rows: int) -> int:
        """Bytes of a layer's keys and values of so many rows in single precision."""
        tokens = rows * (self.prompt + self.generated)
        return int(4 * tokens * self.kv_elements_per_token / self.layers)

    def hidden_bytes(self, rows: int) -> int:
        """Hidden states of so many prompts."""
        return rows * self._hidden_row_bytes

    @functools.cached_property
    def _hidden_row_bytes(self) -> int:
        return states_bytes(1, self.prompt, self.width, 2)

    def between_bytes(self, rows: int) -> int:
        """Hidden states of so many prompts before a layer and behind it, both while it computes."""
        return 2 * self.hidden_bytes(rows)

    def inputs_bytes(self, rows: int) -> int:
        """What models keep of so many embedded prompts while their layers compute.

        Rows of the words and the first layer's input, and of the positions where these are learned.
        """
        return (1 + len(self.tables)) * self.hidden_bytes(rows)

    @functools.cached_property
    def tables(self) -> tuple[str, ...]:
        """Kinds of the embeddings that are added up: of words, and of positions if learned."""
        words = HEAD if self.model.tied else EMBEDDING
        return (words, EMBEDDING) if self.model.decoder is None else (words,)

    def ids_bytes(self, rows: int) -> int:
        """Ids, masks and positions of so many rows when they are longest."""
        return 3 * _ID_BYTES * rows * (self.prompt + self.generated)

    def logits_bytes(self, rows: int) -> int:
        """Logits of the last tokens of so many rows, and the same in single precision."""
        return 6 * rows * self.model.vocab

    def work_bytes(self, rows: int) -> int:
        """Intermediates of the prefill of so many rows: one layer's, or the last tokens' logits."""
        return rows * self._work_row_bytes

    @functools.cached_property
    def _work_row_bytes(self) -> int:
        model = self.model
        inner = model.ffn * (2 if model.gated else 1) * model.experts_per_token
        attention = self.query_width + 2 * model.kv_heads * model.head_dim
        layer = 2 * self.prompt * int(_LAYER_SLICE * max(inner, attention))
        return 2 * self._hidden_row_bytes + max(layer, 4 * model.vocab)

    def tensors(self, kind: str) -> list[tuple[int, int]]:
        """Bytes and number of the weights of a kind, equal ones together."""
        return list(_tensors(self.model, kind))

    def read_bytes(self, kinds: Iterable[str], rows: float) -> float:
        """What one pass of ``rows`` tokens reads of the weights of these kinds.

        All of them, but of the experts of a mixture those that the tokens ask for.
        """
        asked = asked_share(self.model.experts_per_token / self.model.experts, rows)
        return sum(self.kinds[each].bytes * (asked if each == EXPERTS else 1.0) for each in kinds)

    def bytes_of(self, kinds: frozenset[str]) -> int:
        """All weights of these kinds."""
        if kinds not in self._sums:
            self._sums[kinds] = sum(self.kinds[kind].bytes for kind in kinds)
        return self._sums[kinds]

    @functools.cached_property
    def _sums(self) -> dict[frozenset[str], int]:
        """What a search asks for thousands of times."""
        return {}

    def gpu_weight_bytes(self, streamed: frozenset[str], idle: frozenset[str]) -> int:
        """Weights on the accelerator, and the two buffers that others are streamed through."""
        found = self._gpu_weights.get((streamed, idle))
        if found is None:
            found = self.weight_bytes - self.bytes_of(streamed | idle)
            found += self.buffers_bytes(streamed) if streamed else 0
            self._gpu_weights[streamed, idle] = found
        return found

    @functools.cached_property
    def _gpu_weights(self) -> dict[tuple[frozenset[str], frozenset[str]], int]:
        """Asked for as often."""
        return {}

    def buffers_bytes(self, kinds: frozenset[str]) -> int:
        """The two buffers that these kinds are streamed through, each for a layer or the head."""
        layer = self.bytes_of(kinds - {HEAD}) // self.layers
        head = self.kinds[HEAD].bytes if HEAD in kinds else 0
        return (2 if layer else 1) * max(layer, head)


def decoder_job(
    model: ModelConfig,
    *,
    prompt: int,
    generated: int,
    engine: EngineRates = TRANSFORMERS,
    kv_dtype: str | None = None,
) -> DecoderJob:
    """A model with its lengths; ``kv_dtype`` as in :class:`DecoderJob`.

    Raises
    ------
    ValueError
        Lengths below 1 (2 generated), more tokens than the model has positions, an encoder, or a
        model that the integration does not place.
    """
    check_lengths(model, prompt, generated, least=2)
    if model.quantization is not None:
        raise ValueError(
            f"{model.name} is quantised ({model.quantization.method}): its weights stay where the "
            "quantiser keeps them; plan with --executor vllm"
        )
    if model.decoder is not None and model.decoder.latent is not None:
        raise ValueError(
            f"{model.name} keeps latent keys and values ({model.family}), which transformers "
            "unfolds; plan with --executor vllm"
        )
    nbytes: Counter[str] = Counter()
    met: dict[str, float] = {}
    for tensor in model.tensors():
        kind = kind_of(model, tensor)
        nbytes[kind] += 2 * tensor.elements
        met[kind] = met.get(kind, 0.0) + tensor.met * tensor.elements * (kind != EMBEDDING)
    kinds = {kind: KindSize(count, met[kind]) for kind, count in nbytes.items()}
    if kv_dtype is not None:
        share = engine.kv_type_shares.get(kv_dtype, KV_TYPES[kv_dtype].reached)
        engine = replace(engine, attention_share=engine.attention_share * share)
    return DecoderJob(
        model=model,
        kinds=kinds,
        prompt=prompt,
        generated=generated,
        engine=engine,
        kv_dtype=kv_dtype,
    )


@functools.cache
def _tensors(model: ModelConfig, kind: str) -> tuple[tuple[int, int], ...]:
    counts: Counter[int] = Counter()
    for tensor in model.tensors():
        if kind_of(model, tensor) == kind:
            counts[2 * tensor.elements // tensor.count] += tensor.count
    return tuple(counts.items())


_WORDS = ("embed_tokens", "wte")


def kind_of(model: ModelConfig, tensor: TensorKind) -> str:
    """As the integration tells kinds by names: a word embedding that is the head too is a head."""
    if tensor.kind == "embedding":
        return HEAD if model.tied and tensor.name in _WORDS else EMBEDDING
    if tensor.met < 1:
        return EXPERTS
    return "mlp" if tensor.kind == "router" else tensor.kind
