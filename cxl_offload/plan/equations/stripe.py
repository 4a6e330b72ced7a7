"""Bytes of an interleaved allocation on every node, as the memory layer lays granules out."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["stripe_bytes"]


def stripe_bytes(nbytes: int, weights: Mapping[int, int], granule: int) -> dict[int, int]:
    """Bytes a node of one allocation of ``nbytes``.

    Whole granules in cycles; granules of the last, cut cycle by largest remainder with ties to the
    earlier node; the last granule may be a part of one. An allocation smaller than one cycle is
    all on the node of the largest weight, as the memory layer does it (and says).
    """
    common = math.gcd(*weights.values())
    weights = {node: weight // common for node, weight in weights.items()}
    cycle = sum(weights.values())
    if nbytes < cycle * granule:
        heaviest = max(weights, key=lambda node: weights[node])
        return {node: nbytes if node == heaviest else 0 for node in weights}
    granules = -(-nbytes // granule)
    whole, rest = divmod(granules, cycle)
    counts = {node: whole * weight + rest * weight // cycle for node, weight in weights.items()}
    extra = sorted(weights, key=lambda node: -(rest * weights[node] % cycle))
    missing = granules - sum(counts.values())
    for node in extra[:missing]:
        counts[node] += 1
    tail = [node for node in weights if counts[node] > whole * weights[node]]
    last = tail[-1] if tail else list(weights)[-1]
    placed = {node: count * granule for node, count in counts.items()}
    placed[last] -= granules * granule - nbytes
    return placed
