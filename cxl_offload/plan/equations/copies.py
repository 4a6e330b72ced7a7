"""Copies between host tiers and a GPU: setup plus bytes over the slowest of link and tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CopyPath:
    """Host memory to one GPU, pinned, one copy at a time.

    ``tier_bytes_per_s`` are the rates a copy engine reads a tier at; they differ from what CPU
    loads reach. ``tier_setup_s`` is what one copy from a tier costs before its first byte.
    """

    link_bytes_per_s: float
    tier_bytes_per_s: Mapping[str, float]
    tier_setup_s: Mapping[str, float] = field(default_factory=dict)


def path_bandwidth(path: CopyPath, shares: Mapping[str, float]) -> float:
    """Bytes/s of a copy whose pages lie on the tiers by ``shares``: ``min(link, B_i / f_i)``.

    Valid for page-interleaved sources, which keep every tier busy at once; for a tensor cut into
    one piece a tier the times add instead. Source: Wang et al., Hitchhiker's Guide, 6.1.5 and
    Table 6 (H100: DRAM at the link's rate, CXL at its own).

    Raises
    ------
    KeyError
        A share of a tier with no rate.
    """
    rates = [path.tier_bytes_per_s[tier] / share for tier, share in shares.items() if share > 0]
    return min([path.link_bytes_per_s, *rates])


def _setup_s(path: CopyPath, shares: Mapping[str, float]) -> float:
    return sum(share * path.tier_setup_s.get(tier, 0.0) for tier, share in shares.items())


def copy_seconds(path: CopyPath, shares: Mapping[str, float], nbytes: float) -> float:
    """Seconds of one copy: setup (mean over its pages) plus bytes over ``path_bandwidth``."""
    return _setup_s(path, shares) + nbytes / path_bandwidth(path, shares)
