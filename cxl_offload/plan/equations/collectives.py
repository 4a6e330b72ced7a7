"""Time of what ranks send each other in a ring.

Source: Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005,
3.1 and 3.3.
"""

from __future__ import annotations


def ring_seconds(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """A reduce-scatter, or an all-gather, of ``nbytes``: every rank sends all but its part once.

    Valid where messages are large; the latency of a step is not in it.
    """
    return nbytes * (ranks - 1) / ranks / bytes_per_s


def all_reduce_seconds(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """An all-reduce of ``nbytes``: a reduce-scatter, then an all-gather."""
    return 2 * ring_seconds(nbytes, ranks, bytes_per_s)
