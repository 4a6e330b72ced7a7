"""The family of curves that step times follow over the share on the far tier.

One part of a step waits for memory, and one does not. The waiting part is bound by the bandwidth of
the two tiers, or by the latency of the accesses in flight. Hardware prefetchers may do worse where
pages of two tiers mix. Caches may serve some accesses to the far tier. A :class:`Family` is a
sample of such curves. What is known of the machine narrows it, and measured steps give weights to
its members (:mod:`cxl_offload.tune.belief`).

Source of the terms: Wang et al., Hitchhiker's Guide to CXL Memory, 3.4 (bandwidth); Lebedev et al.,
Demystifying CXL Memory Bandwidth Expansion, 5.1 (loss of mixed pages), 7 (latency); Sun et al.,
Demystifying CXL Memory with Genuine CXL-Ready Systems, 4.3 (caches hold more far lines).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.tune.decision import FAR_WEIGHTS, check_share, share_of_weight

SHARES: tuple[float, ...] = (*(share_of_weight(weight) for weight in FAR_WEIGHTS), 1.0)
"""Shares that are chosen from: near only, the mixes of the grid, far only."""


def nearest(share: float) -> int:
    """Index of the share of :data:`SHARES` that is closest to a share from 0 to 1."""
    check_share(share)
    return min(range(len(SHARES)), key=lambda at: abs(SHARES[at] - share))


_MOST_MIXING_LOSS = 0.3
"""Published: mixes lose 20 % in the mean where prefetchers lose track (Lebedev et al., 5.1)."""

_MOST_CACHED = 0.5
"""Of the far accesses. Far data may use two to four times the cache of near data (Sun et al.)."""


@dataclass(frozen=True, slots=True)
class TierRatios:
    """The far tier against the near one, as the profile or the machine file has it.

    Attributes
    ----------
    bandwidth
        Bandwidth of the far tier over that of the near one.
    latency
        Idle latency of the far tier over that of the near one.
    bandwidth_error, latency_error
        One standard deviation of their logarithms. It is small for measured values, and larger for
        values that were published for another mix of reads and writes.
    """

    bandwidth: float
    latency: float
    bandwidth_error: float = 0.35
    latency_error: float = 0.15

    def __post_init__(self) -> None:
        errors = (self.bandwidth_error, self.latency_error)
        ratios = (self.bandwidth, self.latency)
        if not all(0 < one < math.inf for one in ratios) or not all(
            0 <= one < math.inf for one in errors
        ):
            raise ValueError(
                f"far tier with {self.bandwidth} of the bandwidth and {self.latency} times the "
                "latency: both must be above 0, and their errors 0 or more"
            )


@dataclass(frozen=True, slots=True)
class Family:
    """A sample of curves.

    Attributes
    ----------
    log_time
        float64 ``(curves, shares)``: logarithm of the step time over that of the near tier alone.
    memory_part
        float64 ``(curves,)``: part of the step that waits for memory with all pages near.
    pressure
        float64 ``(curves,)``: bandwidth-bound over latency-bound time with all pages near; above 1
        the near tier is saturated.
    """

    log_time: Floats
    memory_part: Floats
    pressure: Floats


def curve_family(ratios: TierRatios, *, curves: int = 4000, seed: int = 0) -> Family:
    """Curves drawn from what is known before anything is measured.

    Half of them lose nothing where tiers mix, and half get no help from caches. So the tuner
    believes in either effect only when measurements show it.
    """
    draw = np.random.default_rng(seed)
    shares = np.asarray(SHARES)
    memory_part = draw.uniform(0.0, 1.0, curves)
    pressure = np.exp(draw.uniform(np.log(0.25), np.log(6.0), curves))
    bandwidth = ratios.bandwidth * np.exp(draw.normal(0.0, ratios.bandwidth_error, curves))
    latency = ratios.latency * np.exp(draw.normal(0.0, ratios.latency_error, curves))
    loss = _half_zero(draw, _MOST_MIXING_LOSS, curves)
    cached = _half_zero(draw, _MOST_CACHED, curves)
    knee = draw.uniform(1.5, 8.0, curves)[:, None]

    far = shares[None, :] * (1.0 - cached[:, None])
    near = 1.0 - shares[None, :]
    bandwidth_time = pressure[:, None] * np.maximum(near, far / bandwidth[:, None])
    latency_time = near + far * latency[:, None]
    wait = (bandwidth_time**knee + latency_time**knee) ** (1.0 / knee)
    mixed = (shares > 0) & (shares < 1)
    wait = wait * np.where(mixed[None, :], 1.0 + loss[:, None], 1.0)
    time = (1.0 - memory_part[:, None]) + memory_part[:, None] * wait / wait[:, :1]
    return Family(np.log(time), memory_part, pressure)


def _half_zero(draw: np.random.Generator, most: float, count: int) -> Floats:
    return np.where(draw.random(count) < 0.5, 0.0, draw.uniform(0.0, most, count))
