"""Workloads that tuners are judged by: random ones, and the published machines under load."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.tune_phases import Pair
from cxl_offload.errors import ConfigError
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.topology import Machine, load_machine
from cxl_offload.tune import TierRatios, tier_ratios

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """A workload, what is known of its machine, and where it comes from."""

    name: str
    step: TwoTierStep
    ratios: TierRatios
    drift: float = 0.0  # relative change of the step time over all decisions
    tails: bool = False  # one step in twenty takes twice as long


def random_case(seed: int) -> Case:
    draw = np.random.default_rng(seed)
    near = draw.uniform(60e9, 400e9)
    far = near * math.exp(draw.uniform(math.log(0.08), math.log(0.6)))
    near_ns = draw.uniform(90, 140)
    far_ns = near_ns * draw.uniform(1.5, 3.0)
    lines = near * near_ns * 1e-9 / 64 * math.exp(draw.uniform(math.log(0.3), math.log(6.0)))
    step = TwoTierStep(
        latency_ns=(near_ns, far_ns),
        bandwidth_bytes_per_s=(near, far),
        lines_in_flight=max(1.0, min(lines, 2000.0)),
        memory_bytes=near * 0.01,
        compute_s=float(draw.choice([0.0, draw.uniform(0.0, 0.03)])),
        mixing_loss=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.25)])),
        far_cached=float(draw.choice([0.0, 0.0, draw.uniform(0.0, 0.4)])),
    )
    known = TierRatios(
        far / near * math.exp(draw.normal(0, 0.15)),
        far_ns / near_ns * math.exp(draw.normal(0, 0.08)),
    )
    return Case(
        f"random {seed}", step, known, drift=float(draw.choice([0.0, draw.uniform(-0.04, 0.04)])),
        tails=bool(draw.random() < 0.3),
    )  # fmt: skip


@dataclass(frozen=True)
class Tiers:
    """The near tier of a shipped machine and one of its far ones."""

    name: str
    machine: Machine
    near: int
    far: int
    ratios: TierRatios

    @property
    def rate(self) -> float:
        """Of the near tier, in bytes a second."""
        access = self.machine.access(self.machine.initiator, self.near)
        assert access is not None
        assert access.read_bandwidth_bytes_per_s is not None
        return access.read_bandwidth_bytes_per_s


def published_tiers() -> list[Tiers]:
    """Every shipped machine with two tiers whose bandwidths are published."""
    found = []
    for file in sorted((ROOT / "configs" / "machines").glob("*.yaml")):
        machine = load_machine(file.stem)
        near = next((tier for tier in machine.tiers if tier.name == "ldram" and tier.nodes), None)
        for tier in machine.tiers:
            if near is None or tier.name not in ("cxl", "rdram") or not tier.nodes:
                continue
            # Some papers print no bandwidth of a tier.
            with contextlib.suppress(ConfigError):
                ratios = tier_ratios(machine, near.nodes[:1], tier.nodes[:1])
                name = f"{machine.name}, {tier.name}"
                found.append(Tiers(name, machine, near.nodes[0], tier.nodes[0], ratios))
    return found


def published_cases() -> list[Case]:
    """Every shipped machine with two tiers, under four kinds of load."""
    kinds = {  # lines in flight over those that saturate the near tier, compute, loss of mixes
        "optimizer, saturated": (3.0, 0.0, 0.0),
        "decode on the CPU": (1.5, 0.3, 0.0),
        "few threads, latency": (0.4, 0.0, 0.0),
        "prefetchers lose mixes": (2.0, 0.0, 0.2),
    }
    cases = []
    near_ns = 110.0  # mean of the published local latencies where a paper prints none
    for tiers in published_tiers():
        rate, ratios = tiers.rate, tiers.ratios
        for kind, (load, compute, loss) in kinds.items():
            step = TwoTierStep(
                latency_ns=(near_ns, near_ns * ratios.latency),
                bandwidth_bytes_per_s=(rate, rate * ratios.bandwidth),
                lines_in_flight=max(1.0, rate * near_ns * 1e-9 / 64 * load),
                memory_bytes=rate * 0.01,
                compute_s=0.01 * compute,
                mixing_loss=loss,
            )
            cases.append(Case(f"{tiers.name}: {kind}", step, ratios))
    return cases


def pairs_of_phases(count: int, *, first: int = 0) -> list[Pair]:
    """Two random workloads on the same machine, as two phases of one program."""
    pairs = []
    for seed in range(first // 2, first // 2 + count):
        one, other = random_case(2 * seed), random_case(2 * seed + 1)
        there = dataclasses.replace(
            other.step,
            latency_ns=one.step.latency_ns,
            bandwidth_bytes_per_s=one.step.bandwidth_bytes_per_s,
        )
        pairs.append(Pair((one.step, there), one.ratios))
    return pairs
