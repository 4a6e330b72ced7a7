"""What the last-level cache keeps of work on the CPU, by the node that the data is on.

How much of the cache data may fill depends on where it lives: sub-NUMA clustering confines data of
DRAM to the slices of its own cluster and CXL data not (Sun et al., Demystifying CXL Memory with
Genuine CXL-Ready Systems, 4.3); some CPUs give memory of the other socket's CXL device a part only
(Wang et al., Hitchhiker's Guide, 3.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine, NodeKind

__all__ = ["Cache", "WorkingSet", "llc_reach_bytes"]


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Bytes that work comes back to; ``random`` accesses are uniform, a ``stream`` goes round."""

    nbytes: float
    pattern: Literal["random", "stream"]

    def __post_init__(self) -> None:
        if not 0 < self.nbytes < float("inf") or self.pattern not in ("random", "stream"):
            raise ConfigError(
                f"working set of {self.nbytes} bytes, pattern {self.pattern!r}: give a finite size "
                "above 0 and 'random' or 'stream'"
            )


@dataclass(frozen=True, slots=True)
class Cache:
    """Hits of CPU work.

    Attributes
    ----------
    reach_bytes
        Node -> bytes of the cache that its data may fill; nothing is cached of other nodes.
    working_sets
        Kind of tensor -> what work on it comes back to; other kinds never hit.
    """

    reach_bytes: Mapping[int, float]
    working_sets: Mapping[str, WorkingSet] = field(default_factory=dict)

    def hit_share(self, tensor_kind: str, node: int) -> float:
        """Share of the accesses to data of ``tensor_kind`` on ``node`` that memory never sees.

        Random accesses hit in proportion to what fits. A stream over more than fits never hits
        (least recently used), one over less always does.
        """
        work = self.working_sets.get(tensor_kind)
        if work is None:
            return 0.0
        fits = self.reach_bytes.get(node, 0.0) / work.nbytes
        if work.pattern == "stream":
            return 1.0 if fits >= 1.0 else 0.0
        return min(1.0, fits)


def llc_reach_bytes(
    machine: Machine,
    *,
    initiator: int | None = None,
    clusters: int = 1,
    remote_cxl_share: float = 1.0,
) -> dict[int, float]:
    """Node -> last-level cache of the initiator's socket that data of the node may fill.

    Parameters
    ----------
    clusters
        Sub-NUMA clusters of a socket: DRAM of the initiator's own cluster fills one's slices. 1
        also on AMD, whose NPS setting does not partition the cache.
    remote_cxl_share
        Part of the cache for CXL memory that hangs on another socket.

    Raises
    ------
    ConfigError
        The machine file has no cache size, or a parameter is out of range.
    """
    start = machine.node(machine.initiator if initiator is None else initiator)
    if start.llc_bytes is None:
        raise ConfigError(
            f"machine {machine.name}: no llc of node {start.id}; the reach of its last-level cache "
            "needs it, add it to the machine file"
        )
    if clusters < 1 or not 0 <= remote_cxl_share <= 1:
        raise ConfigError(
            f"cache reach with {clusters} clusters and a remote share of {remote_cxl_share}: "
            "clusters must be >= 1, the share in [0, 1]"
        )
    whole = float(start.llc_bytes)
    reach = {}
    for node in machine.usable_nodes():
        if node.kind is NodeKind.CXL:
            remote = node.socket is not None and node.socket != start.socket
            reach[node.id] = whole * (remote_cxl_share if remote else 1.0)
        else:
            reach[node.id] = whole / clusters
    return reach
