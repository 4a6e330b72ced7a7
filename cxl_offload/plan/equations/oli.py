"""Object-level interleaving: which objects are worth spreading over tiers."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.exact import exact


def select_objects(
    footprint: Sequence[float], accesses: Sequence[float], *, min_share: float, top_k: int
) -> tuple[int, ...]:
    """Indices, ascending, of the objects to interleave; all others stay on the local tier.

    Among the objects that hold at least ``min_share`` of the total footprint (inclusive, compared
    exactly), the ``top_k`` most accessed; equal counts go to the earlier object.

    Valid for bandwidth-bound objects under many threads; a small object with most of the
    accesses defeats it (XSBench).
    Source: Wang et al., Performance Characterization of CXL Memory, V-B.

    Raises
    ------
    ValueError
        Lists of different length, negative numbers.
    """
    if len(footprint) != len(accesses):
        raise ValueError(f"{len(footprint)} footprints and {len(accesses)} access counts: one each")
    if top_k < 0 or min([*footprint, *accesses, min_share], default=0) < 0:
        raise ValueError("footprints, accesses, min_share and top_k are numbers >= 0")
    sizes = [exact(size) for size in footprint]
    least = exact(min_share) * sum(sizes)
    large = [index for index, size in enumerate(sizes) if size >= least]
    by_accesses = sorted(large, key=lambda index: (-exact(accesses[index]), index))
    return tuple(sorted(by_accesses[:top_k]))
