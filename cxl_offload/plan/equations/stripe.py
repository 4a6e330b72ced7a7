"""Bytes of an interleaved allocation on every node, as the core lays granules out."""

from __future__ import annotations

from collections.abc import Mapping

from cxl_offload import _C


def stripe_bytes(nbytes: int, weights: Mapping[int, int], granule_bytes: int) -> dict[int, int]:
    """Bytes on every node of one allocation of ``nbytes``.

    Parameters
    ----------
    weights
        Node to interleave weight, in the order of the interleave.
    granule_bytes
        Bytes that stay together.

    Raises
    ------
    ValueError
        A weight or the granule is zero.
    """
    return _C.stripe_bytes(list(weights.items()), granule_bytes, nbytes)
