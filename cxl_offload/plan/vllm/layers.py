"""Layers of weights that leave the GPU: their bytes, the nodes that take them, and their copies."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.config import ModelConfig


def layer_bytes(model: ModelConfig) -> int:
    """Weights of one layer, the mean of all, as the checkpoint keeps them."""
    inner = [t for t in model.tensors() if t.kind in ("attention", "mlp", "norm", "router")]
    if model.layers > 1:  # the norm after the last layer is not in one
        inner = [t for t in inner if t.count > 1]
    return int(sum(map(model.bytes_of, inner)) // model.layers)


def copies_bytes_per_s(hardware: Hardware, layers: Sequence[int]) -> float:
    """Rate at which the offloaded layers cross the links, one after the other.

    All GPUs copy their parts of a layer at once, from the same node.
    """
    rates = [min(t.copy_bytes_per_s, hardware.link_bytes_per_s) for t in hardware.nodes]
    seconds = sum(count / rate for count, rate in zip(layers, rates, strict=True))
    return sum(layers) / seconds if seconds else hardware.link_bytes_per_s


def fill_nodes(
    hardware: Hardware, count: int, each: int, rooms: Sequence[float]
) -> list[int] | None:
    """``count`` things of ``each`` bytes on the nodes with the fastest copies; None: no room."""
    order = sorted(
        range(len(rooms)),
        key=lambda at: (
            -min(hardware.nodes[at].copy_bytes_per_s, hardware.link_bytes_per_s),
            at,
        ),
    )
    placed = [0] * len(rooms)
    left = count
    for at in order:
        placed[at] = min(left, int(rooms[at] // each))
        left -= placed[at]
    return placed if left == 0 else None


def spread_kv(nbytes: int, rooms: Sequence[float]) -> list[int] | None:
    """Evicted KV where there is room, in the order of the nodes."""
    placed, left = [], nbytes
    for room in rooms:
        here = min(left, max(0, int(room)))
        placed.append(here)
        left -= here
    return placed if left == 0 else None
