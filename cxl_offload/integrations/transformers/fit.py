"""Bytes of a KV cache before it exists."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import DynamicCache

from cxl_offload.integrations.fit import Need
from cxl_offload.integrations.transformers.conventions import kv_shape
from cxl_offload.integrations.transformers.room import sequence_bytes
from cxl_offload.memory import Interleave, Policy, Weighted
from cxl_offload.plan.kv_types import int4_row_bytes


def kv_needs(
    config: Any,
    kept: torch.dtype | Literal["int4"],
    policy: Policy,
    *,
    rows: int,
    positions: int,
    whole_sequences: bool = False,
    divided_by: int = 1,
) -> list[Need]:
    """What keys and values of a growing cache will allocate.

    Parameters
    ----------
    config
        Of the decoder.
    kept
        The type of what is kept, or 4-bit codes.
    policy
        Of the cache.
    rows, positions
        Sequences, and the most positions of each; windows that slide hold fewer.
    whole_sequences
        Whether a policy that stripes puts each sequence on one node.
    divided_by
        Ranks that divide the heads.
    """
    heads, dim = kv_shape(config)
    position = int4_row_bytes(dim) if isinstance(kept, str) else dim * kept.itemsize
    sizes: Counter[int] = Counter()
    for layer in DynamicCache(config=config).layers:
        positions_kept = min(positions, getattr(layer, "sliding_window", positions))
        sizes[positions_kept * -(-heads // divided_by) * position] += 2
    if whole_sequences and isinstance(policy, Interleave | Weighted):
        return [
            Need("kv", "host", replace(policy, granule_bytes=one), rows * one, count)
            for one, count in ((sequence_bytes(size), count) for size, count in sizes.items())
        ]
    total = sum(rows * size * count for size, count in sizes.items())
    return [Need("kv", "host", policy, total, 1)]
