"""Step times of a simulated workload whose pages are spread over a near and a far tier.

The memory part is a closed queueing network of cache lines in flight
(:func:`cxl_offload.sim.loaded_latency_ns`); nothing here knows the equations of the planner or the
curves of the tuner, so that tuners can be judged by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cxl_offload.core import LINE_BYTES
from cxl_offload.sim.loaded import loaded_latency_ns

_CACHE_BYTES_PER_S = 1e15
"""Caches never bind here: what they serve waits for their latency alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTierStep:
    """One step of a workload.

    Attributes
    ----------
    latency_ns, bandwidth_bytes_per_s
        Idle latency and saturated bandwidth, (near, far).
    lines_in_flight
        Cache lines that all threads together keep under way.
    memory_bytes
        Bytes that a step reads or writes.
    compute_s
        The part of a step that does not wait for memory.
    mixing_loss
        What the memory part loses, as a fraction, wherever both tiers hold pages: prefetchers that
        lose track (Lebedev et al., Demystifying CXL Memory Bandwidth Expansion, 5.1).
    far_cached
        Part of the far tier's accesses that caches serve at the near tier's idle latency (Sun et
        al., Demystifying CXL Memory with Genuine CXL-Ready Systems, 4.3).
    """

    latency_ns: tuple[float, float]
    bandwidth_bytes_per_s: tuple[float, float]
    lines_in_flight: float
    memory_bytes: float
    compute_s: float = 0.0
    mixing_loss: float = 0.0
    far_cached: float = 0.0

    def seconds(self, share: float) -> float:
        """Time of a step, in seconds, with ``share`` of the pages on the far tier.

        Raises
        ------
        ValueError
            The share is not in [0, 1].
        """
        return float(self.curve([share])[0])

    def curve(self, shares: ArrayLike) -> NDArray[np.float64]:
        """:meth:`seconds` of many shares at once: float64 ``(shares,)``."""
        far = np.asarray(shares, dtype=np.float64)
        if not ((far >= 0) & (far <= 1)).all():
            raise ValueError(f"shares {shares!r} on the far tier: need numbers from 0 to 1")
        visits = np.stack(
            [1.0 - far, far * (1.0 - self.far_cached), far * self.far_cached], axis=-1
        )
        latency = loaded_latency_ns(
            visits,
            idle_latency_ns=(*self.latency_ns, self.latency_ns[0]),
            bandwidth_bytes_per_s=(*self.bandwidth_bytes_per_s, _CACHE_BYTES_PER_S),
            lines_in_flight=self.lines_in_flight,
        )
        rate = self.lines_in_flight * LINE_BYTES * 1e9 / (visits * latency).sum(axis=-1)
        mixed = np.where((far > 0) & (far < 1), 1.0 + self.mixing_loss, 1.0)
        result: NDArray[np.float64] = self.compute_s + self.memory_bytes / rate * mixed
        return result
