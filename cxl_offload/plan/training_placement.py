"""Which kind of training tensor goes to which tiers: a mixed-integer program over one step.

A kind is on one node, or interleaved by whole weights. The CPU streams optimizer states and
gradients, the GPU's copy engine the staging buffers; all tiers work at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.plan.flexgen_hardware import Hardware
from cxl_offload.plan.solve import Program
from cxl_offload.plan.stripe import stripe_bytes
from cxl_offload.plan.training_job import HostKind, Stage
from cxl_offload.plan.zero_offload import (
    PREFETCH_SPAN_BYTES,
    StepInputs,
    optimizer_seconds,
    step_times,
)

__all__ = ["StepEstimate", "TrainingStep", "estimate", "kind_bytes", "place"]

GRID = 8
"""Sum of the interleave weights of a kind."""

GRANULE_BYTES = 2 << 20
"""The memory layer's default granule of interleaved tensors."""

_ROOM_SLACK = 2 * GRANULE_BYTES
"""Bytes a kind may take beyond its share on a node: less than two granules."""

Weights = Mapping[str, tuple[int, ...]]
"""Kind -> interleave weights, one a node of the hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What does not depend on placement: times of one micro-batch, and how many there are.

    ``cpu_bytes_per_s`` is what the optimizer draws from local memory.
    """

    kinds: tuple[HostKind, ...]
    stage: Stage
    forward_s: float
    backward_s: float
    accumulation: int
    cpu_bytes_per_s: float

    @property
    def traffic(self) -> float:
        """Bytes the optimizer moves."""
        return sum(kind.traffic for kind in self.kinds)

    @property
    def low_bytes(self) -> int:
        """Low-precision gradients, and as many bytes of parameters."""
        return next(kind.bytes for kind in self.kinds if kind.name == "staging")


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Predicted seconds of a step taken apart."""

    step_s: float
    forward_s: float
    backward_s: float
    gradients_exposed_s: float
    parameters_exposed_s: float
    optimizer_s: float


def kind_bytes(kind: HostKind, weights: Sequence[int]) -> tuple[int, ...]:
    """Bytes of a kind on every node, as one tensor interleaved in the default granules."""
    used = {at: weight for at, weight in enumerate(weights) if weight}
    placed = {next(iter(used)): kind.bytes}
    if len(used) > 1:
        placed = stripe_bytes(kind.bytes, used, GRANULE_BYTES)
    return tuple(placed.get(at, 0) for at in range(len(weights)))


def _copy_seconds(hardware: Hardware, weights: Sequence[int], nbytes: float) -> float:
    """A copy from or to interleaved pages: link and every node's part bound it."""
    rates = [tier.rates.dma_bytes_per_s for tier in hardware.tiers]
    total = sum(weights)
    parts = [w / total / rate for w, rate in zip(weights, rates, strict=True)]
    return nbytes * max(1 / hardware.link_bytes_per_s, *parts)


def estimate(step: TrainingStep, hardware: Hardware, weights: Weights) -> StepEstimate:
    """Seconds of a step, by the equations of ``zero_offload``.

    Every micro-batch sends its gradients during its backward; stage 3 also fetches parameters for
    forward and backward, hidden behind them as far as they last. Parameters return once.
    """
    shares = [0.0] * len(hardware.tiers)
    for kind in step.kinds:
        for at, weight in enumerate(weights[kind.name]):
            shares[at] += kind.traffic * weight / sum(weights[kind.name]) / step.traffic
    optimizer = optimizer_seconds(
        step.traffic,
        cpu_bytes_per_s=step.cpu_bytes_per_s,
        cores=hardware.cores,
        bandwidth_bytes_per_s=[tier.rates.read_bytes_per_s for tier in hardware.tiers],
        latency_ns=[tier.rates.latency_ns for tier in hardware.tiers],
        local_latency_ns=hardware.local_latency_ns,
        shares=shares,
    )
    low = float(step.low_bytes)
    gradients = _copy_seconds(hardware, weights["staging"], low)
    back = gradients
    fetch = 0.0
    if step.stage == 3:
        fetch = _copy_seconds(hardware, weights["params"], low)
        back = 0.0  # parameters stay on the host
    times = step_times(StepInputs(0.0, step.backward_s, max(gradients, fetch), 0.0, 0.0))
    exposed = times.exposed_transfer_s + max(0.0, fetch - step.forward_s)
    count = step.accumulation
    work = count * (step.forward_s + step.backward_s)
    return StepEstimate(
        step_s=work + count * exposed + back + optimizer,
        forward_s=count * step.forward_s,
        backward_s=count * step.backward_s,
        gradients_exposed_s=count * exposed,
        parameters_exposed_s=back,
        optimizer_s=optimizer,
    )


def place(
    step: TrainingStep, hardware: Hardware, *, grid: int = GRID
) -> tuple[Weights, StepEstimate] | None:
    """The placement with the shortest step, or None where the host has no room.

    Of placements that are equally fast the one nearest to the front of the hardware's nodes.
    """
    best = _solve(step, hardware, grid, None)
    if best is None:
        return None
    seconds = estimate(step, hardware, best)
    tidy = _solve(step, hardware, grid, seconds.step_s * (1 + 1e-6))
    if tidy is not None:
        best, seconds = tidy, estimate(step, hardware, tidy)
    return best, seconds


def _solve(
    step: TrainingStep, hardware: Hardware, grid: int, most_s: float | None
) -> Weights | None:
    program = Program()
    unit_b = float(max(kind.bytes for kind in step.kinds))
    fixed = step.accumulation * (step.forward_s + step.backward_s)
    unit_s = fixed + step.traffic / step.cpu_bytes_per_s
    tiers = range(len(hardware.tiers))
    columns = {
        kind.name: [
            program.column(
                f"{kind.name} {hardware.names[at]}",
                high=float(grid),
                whole=True,
                cost=0.0 if most_s is None else (at + 1) * kind.bytes / unit_b,
            )
            for at in tiers
        ]
        for kind in step.kinds
    }
    free = 1.0 if most_s is None else 0.0
    exposed = program.column("exposed", cost=step.accumulation * free)
    fetch = program.column("forward fetch", cost=step.accumulation * free)
    back = program.column("back", cost=free)
    optimizer = program.column("optimizer", cost=free)
    for kind in step.kinds:
        program.row(kind.name, dict.fromkeys(columns[kind.name], 1.0), low=grid, high=grid)
    for at, tier in enumerate(hardware.tiers):
        room = {columns[k.name][at]: k.bytes / grid / unit_b for k in step.kinds}
        high = (tier.usable_bytes - _ROOM_SLACK * len(step.kinds)) / unit_b
        program.row(f"room of {tier.name}", room, high=high)
        moved = {columns[k.name][at]: k.traffic / grid for k in step.kinds if k.traffic}
        scaled = {c: v / tier.rates.read_bytes_per_s / unit_s for c, v in moved.items()}
        program.row(f"optimizer on {tier.name}", {**scaled, optimizer: -1.0}, high=0.0)
    on_cpu = step.traffic / step.cpu_bytes_per_s / unit_s
    program.row("optimizer on the CPU", {optimizer: 1.0}, low=on_cpu)
    late = {
        columns[k.name][at]: k.traffic / grid / PREFETCH_SPAN_BYTES * 1e-9 / hardware.cores
        * (tier.rates.latency_ns - hardware.local_latency_ns) / unit_s
        for at, tier in enumerate(hardware.tiers)
        for k in step.kinds
        if k.traffic
    }  # fmt: skip
    program.row("optimizer with latency", {**late, optimizer: -1.0}, high=-on_cpu)
    names = [("staging", exposed, step.backward_s), ("staging", back, 0.0)]
    if step.stage == 3:
        names = [("staging", exposed, step.backward_s), ("params", exposed, step.backward_s)]
        names.append(("params", fetch, step.forward_s))
    for name, column, hidden in names:
        at_link = step.low_bytes / hardware.link_bytes_per_s
        program.row("link", {column: 1.0}, low=(at_link - hidden) / unit_s)
        for at, tier in enumerate(hardware.tiers):
            each = step.low_bytes / grid / tier.rates.dma_bytes_per_s / unit_s
            terms = {columns[name][at]: each, column: -1.0}
            program.row(f"copies of {tier.name}", terms, high=hidden / unit_s)
    if most_s is not None:
        total = {exposed: float(step.accumulation), fetch: float(step.accumulation)}
        program.row("at most", {**total, back: 1.0, optimizer: 1.0}, high=(most_s - fixed) / unit_s)
    found = program.solve()
    if found is None:
        return None
    return {
        name: _reduced([round(found.values[column]) for column in each])
        for name, each in columns.items()
    }


def _reduced(weights: list[int]) -> tuple[int, ...]:
    common = math.gcd(*weights)
    return tuple(weight // common for weight in weights)
