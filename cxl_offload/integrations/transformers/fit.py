"""Bytes of a KV cache before it exists."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import DynamicCache

from cxl_offload.integrations.transformers.int4_rows import row_bytes


def kv_bytes(config: Any, kept: torch.dtype | Literal["int4"], *, rows: int, positions: int) -> int:
    """Bytes of keys and values of a growing cache.

    Parameters
    ----------
    config
        Of the decoder.
    kept
        The type of what is kept, or 4-bit codes.
    rows, positions
        Sequences, and the most positions of each; windows that slide hold fewer.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = row_bytes(dim) if isinstance(kept, str) else dim * kept.itemsize
    total = 0
    for layer in DynamicCache(config=config).layers:
        positions_kept = min(positions, getattr(layer, "sliding_window", positions))
        total += 2 * rows * positions_kept * heads * position
    return total
