"""Bytes of a KV cache before it exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import DynamicCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import Need
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv
from cxl_offload.integrations.transformers.conventions import kv_shape
from cxl_offload.integrations.transformers.room import sequence_bytes
from cxl_offload.memory import Interleave, Policy, Weighted
from cxl_offload.plan.kv_types import int4_row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizes:
    """What decides how large a growing cache becomes.

    Attributes
    ----------
    rows, positions
        Sequences, and the most positions of each; windows that slide hold fewer.
    divided_by
        Ranks that divide the heads.
    accelerator
        Has the first positions; None: the tier has all.
    """

    rows: int
    positions: int
    divided_by: int = 1
    accelerator: AcceleratorKv | None = None

    def of_layers(
        self, config: Any, kept: torch.dtype | Literal["int4"]
    ) -> Iterator[tuple[int, int]]:
        """Bytes of a sequence's keys, or values, of each layer: on the accelerator, in the tier."""
        heads, dim = kv_shape(config)
        position = int4_row_bytes(dim) if isinstance(kept, str) else dim * kept.itemsize
        position *= -(-heads // self.divided_by)
        for layer in DynamicCache(config=config).layers:
            room = min(self.positions, getattr(layer, "sliding_window", self.positions))
            there = 0 if self.accelerator is None else self.accelerator.positions_of(room)
            yield there * position, (room - there) * position


def accelerator_kv_bytes(config: Any, kept: torch.dtype | Literal["int4"], sizes: KvSizes) -> int:
    """What keys and values will take on the accelerator."""
    return sum(2 * sizes.rows * there for there, _ in sizes.of_layers(config, kept))


def kv_needs(
    config: Any,
    kept: torch.dtype | Literal["int4"],
    policy: Policy,
    sizes: KvSizes,
    *,
    whole_sequences: bool = False,
) -> list[Need]:
    """What keys and values of a growing cache will allocate on the host.

    Parameters
    ----------
    config
        Of the decoder.
    kept
        The type of what is kept, or 4-bit codes.
    policy
        Of the cache.
    sizes
        Of the cache.
    whole_sequences
        Whether a policy that stripes puts each sequence on one node.
    """
    rows, counts = sizes.rows, Counter[int]()
    for _, size in sizes.of_layers(config, kept):
        counts[size] += 2
    if whole_sequences and isinstance(policy, Interleave | Weighted):
        return [
            Need("kv", "host", replace(policy, granule_bytes=one), rows * one, count)
            for one, count in ((sequence_bytes(size), count) for size, count in counts.items())
        ]
    total = sum(rows * size * count for size, count in counts.items())
    return [Need("kv", "host", policy, total, 1)]


def check_length(model: str, prompt: int, answer: int, config: Any) -> None:
    """Refuse prompts and answers that a model has no positions for.

    Raises
    ------
    ConfigError
        They are longer than the configuration says.
    """
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and prompt + answer > most:
        raise ConfigError(
            f"prompts of {prompt} and answers of {answer} tokens are longer than the {most} "
            f"positions of {model}; shorten one of them"
        )
