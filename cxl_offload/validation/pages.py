"""Which node gets how many pages: weighted round robin, even spreading, local first."""

from __future__ import annotations

from collections.abc import Sequence


def weighted_pages(
    weights: Sequence[int], pages: int, *, capacity_pages: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Pages on each node after weighted round robin from the first node with its full weight.

    A node of weight 0 gets none. A node that is full is skipped for the rest of its turn and
    later on; the others keep their weights. When every node with a weight is full, the rest is
    not placed: the answer then sums to less than ``pages``, which the caller must look at.

    Exact for any count: whole rounds are counted, not walked.

    Source: Linux ``MPOL_WEIGHTED_INTERLEAVE`` (``weighted_interleave_nodes``); Wang et al.,
    Hitchhiker's Guide, 3.4.2 (2:2:1 and 100 pages give 40, 40, 20).

    Raises
    ------
    ValueError
        Negative numbers, lists of different length, or pages to place and no weight above 0.
    """
    capacities = [pages] * len(weights) if capacity_pages is None else list(capacity_pages)
    if len(capacities) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(capacities)} capacities: one a node")
    if pages < 0 or min([*weights, *capacities], default=0) < 0:
        raise ValueError("weights, pages and capacities are whole numbers >= 0")
    if pages > 0 and not any(weights):
        raise ValueError(f"{pages} pages and no node with a weight above 0")
    placed = [0] * len(weights)
    left = pages
    while left > 0:
        turn = [
            weight if placed[node] < capacities[node] else 0 for node, weight in enumerate(weights)
        ]
        round_pages = sum(turn)
        if round_pages == 0:
            break
        whole = min(
            left // round_pages,
            *((capacities[n] - placed[n]) // w for n, w in enumerate(turn) if w > 0),
        )
        placed = [have + whole * weight for have, weight in zip(placed, turn, strict=True)]
        left -= whole * round_pages
        for node, weight in enumerate(turn):  # the round in which a node fills, or the last one
            taken = min(weight, left, capacities[node] - placed[node])
            placed[node] += taken
            left -= taken
    return tuple(placed)


def spread_evenly(amount: float, capacities: Sequence[float]) -> tuple[float, ...]:
    """``amount`` spread evenly over nodes; what one cannot hold goes evenly to the others.

    The continuous form of round robin with full nodes skipped: 277 GiB over 196 and 128 GiB are
    149 and 128. Source: Wang et al., Performance Characterization of CXL Memory, IV-B (interleave
    beyond the smallest node); kernel round robin.

    Raises
    ------
    ValueError
        The nodes together hold less than ``amount``.
    """
    if amount > sum(capacities):
        raise ValueError(f"{amount:.6g} do not fit in {list(capacities)}, {sum(capacities):.6g}")
    placed = [0.0] * len(capacities)
    left = float(amount)
    for done, node in enumerate(sorted(range(len(capacities)), key=lambda n: capacities[n])):
        placed[node] = min(float(capacities[node]), left / (len(capacities) - done))
        left -= placed[node]
    return tuple(placed)


def inverse_latency_shares(latency_ns: Sequence[float]) -> tuple[float, ...]:
    """Shares of remote devices in inverse proportion to their latency, without rounding.

    ``(1/L_i) / sum(1/L_j)``. Source: Wu et al., Performance Study of CXL Memory Topology, 3.1.

    Raises
    ------
    ValueError
        No device or a latency that is not above 0.
    """
    if not latency_ns or min(latency_ns) <= 0:
        raise ValueError(f"latencies {list(latency_ns)}: need numbers above 0, one a device")
    inverse = [1.0 / latency for latency in latency_ns]
    total = sum(inverse)
    return tuple(value / total for value in inverse)


def local_first(
    size: float, latency_ns: Sequence[float], *, local_capacity: float, local_fill_fraction: float
) -> tuple[float, ...]:
    """``[local, remote...]``: local memory up to a fraction of it, the rest by inverse latency.

    ``size`` and ``local_capacity`` in one unit, the answer in the same. Source: Wu et al., 3.1.
    """
    local = min(size, local_capacity * local_fill_fraction)
    rest = size - local
    return (local, *(rest * share for share in inverse_latency_shares(latency_ns)))
