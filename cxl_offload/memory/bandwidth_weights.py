"""Weights of a stripe that nobody gave: those that suit the bandwidths of its nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from cxl_offload.plan.equations.interleave import best_weights
from cxl_offload.topology import Machine

_WEIGHTS_TOTAL = 12
"""Granules of a cycle. Enough for 4:1 and 3:1 alike; a node of less than a thirteenth of the rest
is not worth it."""


def weights_by_bandwidth(parts: Mapping[str, Sequence[int]], machine: Machine) -> dict[int, int]:
    """Node to weight, by what the machine's firmware (HMAT) or file says of reading each.

    Parameters
    ----------
    parts
        How a node or a tier is called, to its nodes, which all get the weight of the slowest.

    Raises
    ------
    ValueError
        A bandwidth is not known, or a node would get nothing.
    """
    rates = []
    for part, nodes in parts.items():
        known = [
            max(
                access.read_bandwidth_bytes_per_s or 0.0
                for access in machine.accesses
                if access.target == node
            )
            for node in nodes
            if any(access.target == node for access in machine.accesses)
        ]
        if len(known) < len(nodes) or not all(known):
            raise ValueError(
                f"the bandwidth of {part} is not known here; give weights, such as {part}=4"
            )
        rates.append(min(known))
    weights = best_weights(rates, total=_WEIGHTS_TOTAL)
    if min(weights) == 0:
        raise ValueError(
            f"by bandwidth the weights of {', '.join(parts)} are {weights}; leave those of 0 out"
        )
    common = math.gcd(*weights)
    pairs = zip(parts.values(), weights, strict=True)
    return {node: weight // common for nodes, weight in pairs for node in nodes}
