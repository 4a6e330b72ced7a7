"""Bytes that a run will need by kind, and whether the nodes have them, before it loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import DynamicCache

from cxl_offload.integrations.transformers.int4_rows import row_bytes
from cxl_offload.memory import Bind, Interleave, Policy, Session, Weighted
from cxl_offload.units import format_bytes


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


def check_room(
    needs: Mapping[str, int], policies: Mapping[str, Policy], session: Session
) -> dict[int, int]:
    """Refuse what nodes cannot hold.

    Only policies that name their nodes for good are looked at: what is preferred goes on elsewhere.

    Returns
    -------
    dict
        Node to bytes.

    Raises
    ------
    MemoryError
        Names the node, what it needs by kind, and what it has.
    """
    by_node: dict[int, Counter[str]] = {}
    for kind, nbytes in needs.items():
        for node, share in _shares(policies.get(kind), nbytes, by_node, session).items():
            by_node.setdefault(node, Counter())[kind] += share
    for node, kinds in by_node.items():
        free = _free(node, session)
        if kinds.total() > free:
            parts = " + ".join(f"{kind} {format_bytes(count)}" for kind, count in kinds.items())
            raise MemoryError(
                f"node {node}: {format_bytes(kinds.total())} needed ({parts}), "
                f"{format_bytes(free)} free; place less there"
            )
    return {node: kinds.total() for node, kinds in by_node.items()}


def _shares(
    policy: Policy | None, nbytes: int, taken: Mapping[int, Counter[str]], session: Session
) -> dict[int, int]:
    if isinstance(policy, Interleave | Weighted):
        weights = (
            dict.fromkeys(policy.nodes, 1) if isinstance(policy, Interleave) else policy.weights
        )
        return {node: nbytes * weight // sum(weights.values()) for node, weight in weights.items()}
    if not isinstance(policy, Bind):
        return {}
    shares, left = {}, nbytes
    for node in policy.nodes:
        held = taken[node].total() if node in taken else 0
        shares[node] = max(0, min(left, _free(node, session) - held))
        left -= shares[node]
    shares[policy.nodes[-1]] += left
    return shares


def _free(node: int, session: Session) -> int:
    """What a node of a simulated machine can give; of a real one, what it has in all.

    Page cache makes a real node look fuller than it is; the kernel gives it up.
    """
    if session.is_simulated:
        return session.free_bytes(node)
    return session.machine.node(node).capacity_bytes
