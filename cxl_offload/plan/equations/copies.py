"""Copies between interleaved host memory and a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.equations.interleave import bandwidth_bound
from cxl_offload.renamed import old_names


def path_bytes_per_s(
    link_bytes_per_s: float, tier_bytes_per_s: Sequence[float], shares: Sequence[float]
) -> float:
    """Bytes/s of a copy whose pages lie on the tiers by ``shares``: ``min(link, B_i / f_i)``.

    The rates of tiers are those at which a copy engine reads them; CPU loads reach others.

    Valid for page-interleaved sources, which keep every tier busy at once; for a tensor cut into
    one piece a tier the times add instead. Source: Wang et al., Hitchhiker's Guide, 6.1.5 and
    Table 6 (H100: DRAM at the link's rate, CXL at its own).
    """
    return min(link_bytes_per_s, bandwidth_bound(tier_bytes_per_s, shares))


__getattr__ = old_names(__name__)
