"""Compares the far tier with the near one, from what is known of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine
from cxl_offload.tune.curves import TierRatios
from cxl_offload.tune.tiers import check_tiers

_UNKNOWN_LATENCY_RATIO = 2.1
"""CXL over local DRAM (Wang et al., Performance Characterization of CXL Memory, V-A)."""

_UNKNOWN_LATENCY_ERROR = 0.3
"""Published ratios lie between 1.4 and 2.8: within this factor of 2.1, up and down."""


def tier_ratios(
    machine: Machine, near: Sequence[int], far: Sequence[int], *, initiator: int | None = None
) -> TierRatios:
    """Ratios of two groups of nodes, seen from the CPUs of ``initiator``.

    Bandwidths of a group are added, latencies are averaged. If a latency is not known, the
    published ratio of CXL memory to local DRAM is taken, with a wide error.

    Raises
    ------
    ConfigError
        A bandwidth is not known; says of which node, and what to do.
    ValueError
        No node, or one that is in both groups.
    """
    check_tiers(near, far)
    seen_from = machine.initiator if initiator is None else initiator

    def bandwidth(nodes: Sequence[int]) -> float:
        total = 0.0
        for node in nodes:
            access = machine.access(seen_from, node)
            rate = None if access is None else access.read_bandwidth_bytes_per_s
            if rate is None:
                raise ConfigError(
                    f"machine {machine.name}: no bandwidth from node {seen_from} to node {node}; "
                    "run `cxl-offload profile`, or give TierRatios yourself"
                )
            total += rate
        return total

    def latency(nodes: Sequence[int]) -> float | None:
        found = [machine.access(seen_from, node) for node in nodes]
        known = [one.read_latency_ns for one in found if one and one.read_latency_ns is not None]
        return sum(known) / len(known) if len(known) == len(nodes) and known else None

    rate = bandwidth(far) / bandwidth(near)
    near_ns, far_ns = latency(near), latency(far)
    if near_ns is None or far_ns is None:
        return TierRatios(rate, _UNKNOWN_LATENCY_RATIO, latency_error=_UNKNOWN_LATENCY_ERROR)
    return TierRatios(rate, far_ns / near_ns)
