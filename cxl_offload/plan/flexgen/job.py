"""What FlexGen 0.1.8 allocates for a model and a batch, to the byte, from shapes alone.

The same arithmetic as the integration's, which takes it from FlexGen's own layers; a test holds the
two against each other. Models other than OPT are grouped as FlexGen would group them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from cxl_offload.plan.flexgen.engine import STOCK, EngineRates
from cxl_offload.plan.model.config import ModelConfig

__all__ = ["FlexGenJob", "WeightLevel", "flexgen_job", "runs_in_flexgen", "weight_homes"]

LEAST_SHARE = 0.005
"""A home asked for that gets less of the weights than this is refused when run."""

_EDGE = 1e-6
"""Percent a cut keeps away from the middle of a tensor, far above the noise of sums."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that FlexGen shares out together, and how many equal groups there are."""

    shapes: tuple[tuple[int, ...], ...]
    count: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every weight."""
        return tuple(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class WeightLevel:
    """A cut that FlexGen can realise: ``percent`` puts ``bytes_below`` before it."""

    percent: float
    bytes_below: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexGenJob:
    """One model with its prompt and answer lengths; half precision throughout.

    ``params`` are those that a token meets (arithmetic), ``kv_width`` elements of K of one token
    and layer.
    """

    groups: tuple[WeightGroup, ...]
    params: float
    layers: int
    width: int
    heads: int
    kv_width: int
    vocab: int
    prompt: int
    generated: int
    engine: EngineRates = STOCK

    @property
    def activation_bytes(self) -> float:
        """Bytes of one element between layers: half precision."""
        return 2.0

    @property
    def positions(self) -> int:
        """Tokens a cache holds: all but the last, which nobody attends to."""
        return self.prompt + self.generated - 1

    @property
    def mean_kv_tokens(self) -> float:
        """Length of a sequence at a decode step, in the mean (FlexGen's cost model)."""
        return self.prompt + self.generated / 2

    @property
    def weight_bytes(self) -> int:
        """All weights, FlexGen's second copy of the embedding included."""
        return sum(2 * sum(group.sizes) * group.count for group in self.groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.kv_elements_per_token

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers in them."""
        return 2 * self.layers * self.kv_width

    @property
    def kv_sequence_bytes(self) -> int:
        """The cache of one sequence."""
        return self.kv_bytes_per_token * self.positions

    @property
    def kv_tensors(self) -> int:
        """K and V of every layer, for one GPU batch."""
        return 2 * self.layers

    def kv_tensor_bytes(self, sequences: int) -> int:
        """K (or V) of so many sequences, in one layer."""
        return 2 * self.positions * sequences * self.kv_width

    def workspace_tensor_bytes(self, gpu_batch: int) -> int:
        """Single-precision K (or V) of one batch that CPU attention reads."""
        return 4 * self.positions * gpu_batch * self.kv_width

    @staticmethod
    def workspace_tensors(batches: int) -> int:
        """How many of them there are: two pairs where loads overlap with attention."""
        return 4 if batches > 1 else 2

    def hidden_bytes(self, gpu_batch: int) -> int:
        """Hidden states of one batch's prompts."""
        return 2 * gpu_batch * self.prompt * self.width

    def mask_bytes(self, gpu_batch: int) -> int:
        """The attention mask of one batch."""
        return gpu_batch * (self.prompt + self.generated)

    def gpu_loaded_bytes(self) -> int:
        """Weights on their way: the largest group twice."""
        return 2 * max(2 * sum(group.sizes) for group in self.groups)

    def gpu_work_bytes(self, gpu_batch: int) -> int:
        """Intermediates of one batch: the most of scores, MLP and logits."""
        hidden = self.hidden_bytes(gpu_batch)
        scores = 4 * gpu_batch * self.heads * self.prompt**2
        logits = 2 * gpu_batch * self.prompt * self.vocab
        return max(scores + 6 * hidden, 4 * hidden, logits)

    def levels(self) -> tuple[WeightLevel, ...]:
        """Cuts with different outcomes, ascending, from nothing to everything.

        FlexGen puts a weight where its middle falls when its group is laid out in order, so only
        cuts between middles differ; those that would give a home less than ``LEAST_SHARE`` of the
        weights are left out.
        """
        middles: Counter[float] = Counter()
        for group in self.groups:
            for middle, size in zip(_middles(group.sizes), group.sizes, strict=True):
                middles[middle] += 2 * size * group.count
        total, placed = self.weight_bytes, 0
        made = [WeightLevel(0.0, 0)]
        ordered = sorted(middles)
        for at, middle in enumerate(ordered[:-1]):
            placed += middles[middle]
            room = ordered[at + 1] - middle > 3 * _EDGE
            enough = placed - made[-1].bytes_below >= LEAST_SHARE * total
            if room and enough and total - placed >= LEAST_SHARE * total:
                made.append(WeightLevel(_round_between(middle, ordered[at + 1]), placed))
        return (*made, WeightLevel(100.0, total))


def _middles(sizes: tuple[int, ...]) -> list[float]:
    total = sum(sizes)
    return [
        (end - size / 2) / total * 100 for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def _round_between(low: float, high: float) -> float:
    """The number with the fewest decimals that is safely between, nearest to the middle."""
    for decimals in range(10):
        made = round((low + high) / 2, decimals)
        if low + _EDGE < made < high - _EDGE:
            return made
    return (low + high) / 2


def weight_homes(sizes: tuple[int, ...], percents: tuple[float, ...]) -> list[int]:
    """Index of the home of every weight of a group (FlexGen's ``init_weight_list``)."""
    cuts = list(accumulate(percents))
    return [
        next((at for at, cut in enumerate(cuts) if middle < cut), len(cuts) - 1)
        for middle in _middles(sizes)
    ]


def _opt_groups(model: ModelConfig) -> tuple[WeightGroup, ...]:
    h, row = model.hidden, (model.hidden,)
    attention = ((h, h), row) * 4 + (row, row)
    mlp = ((4 * h, h), (4 * h,), (h, 4 * h), row, row, row)
    return (
        WeightGroup(((model.vocab, h), (model.positions + 2, h)), 1),
        WeightGroup(attention, model.layers),
        WeightGroup(mlp, model.layers),
        WeightGroup((row, row, (model.vocab, h)), 1),
    )


def _other_groups(model: ModelConfig) -> tuple[WeightGroup, ...]:
    """Embeddings, one attention, one MLP (all experts) a layer, and the output."""
    first: list[tuple[int, ...]] = []
    last: list[tuple[int, ...]] = []
    attention: list[tuple[int, ...]] = []
    mlp: list[tuple[int, ...]] = []
    for tensor in model.tensors():
        if tensor.kind == "embedding":
            first.append(tensor.shape)
        elif tensor.count == 1 and model.layers > 1:
            last.append(tensor.shape)
        else:
            into = mlp if tensor.kind in ("mlp", "router") else attention
            into += [tensor.shape] * (tensor.count // model.layers)
    if model.tied:
        last.append((model.vocab, model.embed_dim))
    groups = ((first, 1), (attention, model.layers), (mlp, model.layers), (last, 1))
    return tuple(WeightGroup(tuple(shapes), count) for shapes, count in groups if shapes)


def flexgen_job(model: ModelConfig, *, prompt: int, generated: int) -> FlexGenJob:
    """A model with its lengths.

    Raises
    ------
    ValueError
        Lengths below 1 (2 generated), more tokens than the model has positions, or an encoder.
    """
    if prompt < 1 or generated < 2:
        raise ValueError(
            f"prompt {prompt} and {generated} generated tokens: at least 1 and 2 are needed"
        )
    if not model.generates:
        raise ValueError(f"{model.name} is an encoder ({model.family}): it generates nothing")
    if prompt + generated > model.positions:
        raise ValueError(
            f"prompt of {prompt} and answer of {generated} tokens are longer than the "
            f"{model.positions} positions of {model.name}; shorten one of them"
        )
    return FlexGenJob(
        groups=_opt_groups(model) if runs_in_flexgen(model) is None else _other_groups(model),
        params=model.active_parameters,
        layers=model.layers,
        width=model.hidden,
        heads=model.heads,
        kv_width=model.kv_heads * model.head_dim,
        vocab=model.vocab,
        prompt=prompt,
        generated=generated,
    )


def runs_in_flexgen(model: ModelConfig) -> str | None:
    """Why FlexGen does not compute this model, or None where it does."""
    if model.family != "opt":
        return f"FlexGen computes OPT and Galactica only, and {model.name} is {model.family}"
    wrong = {
        "the layer norm comes after": not model.norm_first,
        f"word_embed_proj_dim is {model.embed_dim}": model.embed_dim != model.hidden,
        f"ffn_dim is {model.ffn}": model.ffn != 4 * model.hidden,
        "word embeddings are not tied": not model.tied,
        "there is no final layer norm": not model.final_norm,
        f"activation {model.activation} is not relu or gelu": (
            model.activation not in ("relu", "gelu")
        ),
    }
    reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
    return f"FlexGen does not compute {model.name}: {reasons[0]}" if reasons else None
