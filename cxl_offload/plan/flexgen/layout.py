"""What FlexGen 0.1.8 allocates and how it shares it out, to the byte, from shapes alone.

FlexGen keeps weights in groups (one attention, one MLP, one embedding) and never cuts a weight: a
group is laid out in order, cut at the same percentages of its elements as every other group, and a
weight goes where its middle falls. The KV cache is cut between sequences. Homes are always in the
same order: the drive, the parts of the host, the GPU. The planner and the integration both take
this from here; nothing here needs torch or FlexGen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

LEAST_SHARE = 0.005
"""A home that gets less of the weights than this holds a few layer norms and nothing else: people
are refused it, and the planner does not offer it."""


@dataclass(frozen=True)
class WeightGroup:
    """Weights that FlexGen shares out together, in its order, and the number of equal groups."""

    shapes: tuple[tuple[int, ...], ...]
    count: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of every weight."""
        return tuple(math.prod(shape) for shape in self.shapes)


def opt_groups(*, layers: int, hidden: int, vocab: int, positions: int) -> tuple[WeightGroup, ...]:
    """The groups of an OPT or Galactica model; the embedding is held twice, as in FlexGen."""
    h, row = hidden, (hidden,)
    attention = ((h, h), row) * 4 + (row, row)
    mlp = ((4 * h, h), (4 * h,), (h, 4 * h), row, row, row)
    return (
        WeightGroup(((vocab, h), (positions + 2, h)), 1),
        WeightGroup(attention, layers),
        WeightGroup(mlp, layers),
        WeightGroup((row, row, (vocab, h)), 1),
    )


def weight_middles(sizes: Sequence[int]) -> list[float]:
    """Where the middle of every weight of a group is, in percent of the group's elements."""
    ends = list(accumulate(sizes))
    return [(end - size / 2) / ends[-1] * 100 for size, end in zip(sizes, ends, strict=True)]


def weight_homes(sizes: Sequence[int], cuts: Sequence[float]) -> list[int]:
    """Index of the home of every weight of a group.

    Parameters
    ----------
    cuts
        Percent, ascending, one between every two homes.

    Source: FlexGen, ``flex_opt.init_weight_list``, for any number of homes.
    """
    return [bisect_right(cuts, middle) for middle in weight_middles(sizes)]


@dataclass(frozen=True, slots=True)
class WeightCut:
    """A place where all groups can be cut: between two middles, with so many bytes before it."""

    low_percent: float
    high_percent: float
    bytes_below: int

    @property
    def at(self) -> float:
        """Half-way, in percent: FlexGen's rule takes cuts so."""
        return (self.low_percent + self.high_percent) / 2


def weight_cuts(groups: Sequence[WeightGroup]) -> list[WeightCut]:
    """Every cut with another outcome, ascending, from nothing before it to everything."""
    bytes_at: Counter[float] = Counter()
    for group in groups:
        for middle, size in zip(weight_middles(group.sizes), group.sizes, strict=True):
            bytes_at[middle] += 2 * size * group.count
    middles = sorted(bytes_at)
    edges = [0.0, *middles, 100.0]
    below = accumulate((bytes_at[middle] for middle in middles), initial=0)
    return [WeightCut(*ends, count) for ends, count in zip(pairwise(edges), below, strict=True)]


def cuts_at(groups: Sequence[WeightGroup], below: Sequence[int]) -> tuple[float, ...]:
    """The cuts, in percent, that leave so many bytes of weights before them.

    Parameters
    ----------
    below
        Bytes before every cut, in half precision.

    Raises
    ------
    ValueError
        A cut would go through a weight; names the nearest place where it would not.
    """
    cuts = weight_cuts(groups)
    middle_of = {cut.bytes_below: cut.at for cut in cuts}
    middle_of |= {0: 0.0, cuts[-1].bytes_below: 100.0}
    for wanted in below:
        if wanted not in middle_of:
            nearest = min(middle_of, key=lambda count: abs(count - wanted))
            raise ValueError(
                f"a cut with {wanted} bytes of weights before it would go through a weight; the "
                f"nearest that does not has {nearest}"
            )
    return tuple(middle_of[wanted] for wanted in below)


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """Sizes of one model's tensors with its prompt and answer lengths, in half precision.

    Attributes
    ----------
    width, kv_width
        Elements of a hidden state, and of K of one token and layer.
    prompt, generated
        Tokens of every padded prompt, and tokens to generate.
    """

    groups: tuple[WeightGroup, ...]
    layers: int
    width: int
    heads: int
    kv_width: int
    vocab: int
    prompt: int
    generated: int

    @property
    def positions(self) -> int:
        """Tokens a cache holds: all but the last, to which no later token attends."""
        return self.prompt + self.generated - 1

    @cached_property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(2 * sum(group.sizes) * group.count for group in self.groups)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers in K and V of one token over all layers."""
        return 2 * self.layers * self.kv_width

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of them."""
        return 2 * self.kv_elements_per_token

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
        """Single-precision K (or V) of one batch that FlexGen's CPU attention reads."""
        return 4 * self.positions * gpu_batch * self.kv_width

    @staticmethod
    def workspace_tensors(batches: int, *, overlap: bool = True, sep_layer: bool = True) -> int:
        """How many of them there are: two pairs where one is filled ahead."""
        return 4 if not sep_layer or (overlap and batches > 1) else 2

    def hidden_bytes(self, gpu_batch: int) -> int:
        """Hidden states of one batch's prompts."""
        return 2 * gpu_batch * self.prompt * self.width

    def mask_bytes(self, gpu_batch: int) -> int:
        """The attention mask of one batch."""
        return gpu_batch * (self.prompt + self.generated)

    @cached_property
    def gpu_loaded_bytes(self) -> int:
        """Weights on their way: the largest group twice."""
        return 2 * max(2 * sum(group.sizes) for group in self.groups)

    @staticmethod
    def copies_on_host(batches: int) -> int:
        """How many hidden states, or masks, the host holds: every batch's, and one being moved."""
        return batches + 1

    def gpu_batch_bytes(self, gpu_batch: int, batches: int, *, activations: bool) -> int:
        """Intermediates on the GPU, and hidden states: all batches', or two on their way."""
        held = batches if activations else 2
        return held * self.hidden_bytes(gpu_batch) + self.gpu_work_bytes(gpu_batch)

    def gpu_work_bytes(self, gpu_batch: int) -> int:
        """Intermediates of one batch: the most of scores, MLP and logits."""
        hidden = self.hidden_bytes(gpu_batch)
        scores = 4 * gpu_batch * self.heads * self.prompt**2
        logits = 2 * gpu_batch * self.prompt * self.vocab
        return max(scores + 6 * hidden, 4 * hidden, logits)
