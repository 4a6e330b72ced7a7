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
