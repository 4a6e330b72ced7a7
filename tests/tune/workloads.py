"""Simulated workloads for tuners: seeded, of many kinds, timed by the simulator alone."""

from __future__ import annotations

import math

import numpy as np

from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.tune import TierRatios, Tuner, Window
from cxl_offload.tune.curves import SHARES


def random_step(draw: np.random.Generator) -> TwoTierStep:
    """A workload between latency-bound and deeply saturated, with mixes that lose or do not."""
    near = draw.uniform(60e9, 400e9)
    latency = draw.uniform(90, 140)
    lines = near * latency * 1e-9 / 64 * math.exp(draw.uniform(math.log(0.3), math.log(6.0)))
    return TwoTierStep(
        latency_ns=(latency, latency * draw.uniform(1.5, 3.0)),
        bandwidth_bytes_per_s=(near, near * math.exp(draw.uniform(math.log(0.08), math.log(0.6)))),
        lines_in_flight=max(1.0, min(lines, 2000.0)),
        memory_bytes=near * 0.01,
        compute_s=float(draw.choice([0.0, draw.uniform(0.0, 0.03)])),
        mixing_loss=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.25)])),
        far_cached=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.4)])),
    )


def published_ratios(step: TwoTierStep, draw: np.random.Generator) -> TierRatios:
    """What a machine file would say: the truth within 15 % and 8 %."""
    near, far = step.bandwidth_bytes_per_s
    near_ns, far_ns = step.latency_ns
    return TierRatios(
        far / near * math.exp(draw.normal(0.0, 0.15)),
        far_ns / near_ns * math.exp(draw.normal(0.0, 0.08)),
    )


class NoisyRun:
    """Windows of a workload at the share that a tuner asks for."""

    def __init__(self, step: TwoTierStep, *, seed: int, noise: float = 0.05, steps: int = 20):
        self._curve = dict(zip(SHARES, step.curve(SHARES), strict=True))
        self._step = step
        self._draw = np.random.default_rng(seed)
        self._noise = noise
        self._steps = steps

    def seconds(self, share: float) -> float:
        if share not in self._curve:
            self._curve[share] = self._step.seconds(share)
        return float(self._curve[share])

    def best(self) -> float:
        return min(self.seconds(share) for share in SHARES)

    def window(self, share: float) -> Window:
        noise = 1.0 + self._noise * self._draw.standard_normal(self._steps)
        return Window.of(self.seconds(share) * np.maximum(noise, 0.2))

    def tune(self, tuner: Tuner, decisions: int) -> list[float]:
        """Shares after each decision."""
        return [tuner.decide(self.window(tuner.share)).share for _ in range(decisions)]
