"""Which kind of training tensor goes to which tiers: a mixed-integer program over one step.

A kind is on one node, or interleaved by whole weights. The CPU streams optimizer states and
gradients, the GPU's copy engine the staging buffers; all tiers work at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.solve import Program
from cxl_offload.plan.training.drive import IN_MEMORY, DriveSeconds
from cxl_offload.plan.training.job import HostKind, Stage
from cxl_offload.plan.training.zero_offload import (
    PREFETCH_SPAN_BYTES,
    StepInputs,
    optimizer_seconds,
    step_times,
)

GRID = 8
"""Sum of the interleave weights of a kind."""


_ROOM_SLACK = 2 * HUGE_PAGE_BYTES
"""Bytes a kind may take beyond its share on a node: less than two granules."""

Weights = Mapping[str, tuple[int, ...]]
"""Kind -> interleave weights, one a node of the hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What does not depend on placement: times of one micro-batch, and how many there are.

    ``cpu_bytes_per_s`` is what the optimizer draws from local memory. Kinds are what one host
    holds for all its GPUs. ``between_s`` are seconds in which GPUs send each other gradients of a
    micro-batch, or all parameters, which takes as long; 0 for one GPU. ``low_bytes`` are those of
    gradients of a host's GPUs, and of as many parameters; ``drive`` is what a drive takes.
    """

    kinds: tuple[HostKind, ...]
    stage: Stage
    forward_s: float
    backward_s: float
    accumulation: int
    cpu_bytes_per_s: float
    between_s: float = 0.0
    drive: DriveSeconds = IN_MEMORY

    @property
    def traffic(self) -> float:
        """Bytes the optimizer moves."""
        return sum(kind.traffic for kind in self.kinds)

    @property
    def sends(self) -> int:
        """How often gradients leave the GPU in a step; stage 1 adds them up there first."""
        return 1 if self.stage == 1 else self.accumulation

    @property
    def drive_s(self) -> float:
        """Seconds in which nothing but the drive works."""
        return self.drive.optimizer + self.drive.back

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
    drive_s: float = 0.0


def kind_bytes(kind: HostKind, weights: Sequence[int]) -> tuple[int, ...]:
    """Bytes of a kind on every node, as one tensor interleaved in the default granules."""
    used = {at: weight for at, weight in enumerate(weights) if weight}
    placed = {next(iter(used)): kind.bytes}
    if len(used) > 1:
        placed = stripe_bytes(kind.bytes, used, HUGE_PAGE_BYTES)
    return tuple(placed.get(at, 0) for at in range(len(weights)))


def _copy_seconds(hardware: Hardware, weights: Sequence[int], nbytes: float) -> float:
    """A copy from or to interleaved pages: link and every node's part bound it."""
    rates = [tier.copy_bytes_per_s for tier in hardware.nodes]
    total = sum(weights)
    parts = [w / total / rate for w, rate in zip(weights, rates, strict=True)]
    return nbytes * max(1 / hardware.link_bytes_per_s, *parts)


def estimate(step: TrainingStep, hardware: Hardware, weights: Weights) -> StepEstimate:
    """Seconds of a step, by the equations of ``training.zero_offload``.

    Every micro-batch sends its gradients during its backward, in stage 1 the last one those of all;
    stage 3 also fetches parameters for forward and backward, hidden behind them as far as they
    last. Parameters return once.
    """
    shares = [0.0] * len(hardware.nodes)
    for kind in step.kinds:
        for at, weight in enumerate(weights[kind.name]):
            shares[at] += kind.traffic * weight / sum(weights[kind.name]) / step.traffic
    optimizer = optimizer_seconds(
        step.traffic,
        cpu_bytes_per_s=step.cpu_bytes_per_s,
        cores=hardware.cores,
        bandwidth_bytes_per_s=[tier.read_bytes_per_s for tier in hardware.nodes],
        latency_ns=[tier.latency_ns for tier in hardware.nodes],
        local_latency_ns=hardware.local_latency_ns,
        shares=shares,
    )
    low = float(step.low_bytes)
    gradients = _copy_seconds(hardware, weights["staging"], low) + step.between_s
    back = gradients
    fetch = 0.0
    if step.stage == 3:
        fetch = _copy_seconds(hardware, weights["params"], low)
        fetch = max(fetch, step.drive.fetch) + step.between_s
        back = 0.0  # parameters stay on the host
    times = step_times(StepInputs(0.0, step.backward_s, max(gradients, fetch), 0.0, 0.0))
    exposed = times.exposed_transfer_s + max(0.0, fetch - step.forward_s)
    count = step.accumulation
    work = count * (step.forward_s + step.backward_s)
    return StepEstimate(
        step_s=work + step.sends * exposed + back + optimizer + step.drive_s,
        forward_s=count * step.forward_s,
        backward_s=count * step.backward_s,
        gradients_exposed_s=step.sends * exposed,
        parameters_exposed_s=back,
        optimizer_s=optimizer,
        drive_s=step.drive_s,
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
    nearest = _solve(step, hardware, grid, seconds.step_s * (1 + 1e-6))
    if nearest is not None:
        best, seconds = nearest, estimate(step, hardware, nearest)
    return best, seconds


def _solve(
    step: TrainingStep, hardware: Hardware, grid: int, most_s: float | None
) -> Weights | None:
    """The fastest weights; with ``most_s`` the nearest ones that are as fast."""
    program = _StepProgram(step, hardware, grid, most_s)
    found = program.program.solve()
    if found is None:
        return None
    return {
        name: _reduced([round(found.values[column]) for column in each])
        for name, each in program.weights.items()
    }


class _StepProgram:
    """One step as a program: interleave weights of every kind on every node, and seconds."""

    def __init__(
        self, step: TrainingStep, hardware: Hardware, grid: int, most_s: float | None
    ) -> None:
        self.step, self.hardware, self.grid = step, hardware, grid
        self.program = Program()
        self._unit_b = float(max(kind.bytes for kind in step.kinds))
        fixed = step.accumulation * (step.forward_s + step.backward_s) + step.drive_s
        self._unit_s = fixed + step.traffic / step.cpu_bytes_per_s
        self._columns(by_rank=most_s is not None)
        self._rooms()
        self._optimizer()
        self._copies()
        if most_s is not None:
            count = float(step.sends)
            total = {self.exposed: count, self.fetch: count, self.back: 1.0, self.optimizer: 1.0}
            self.program.row("at most", total, high=(most_s - fixed) / self._unit_s)

    def _columns(self, *, by_rank: bool) -> None:
        self.weights = {
            kind.name: [
                self.program.column(
                    f"{kind.name} {name}",
                    high=float(self.grid),
                    whole=True,
                    cost=(at + 1) * kind.bytes / self._unit_b if by_rank else 0.0,
                )
                for at, name in enumerate(self.hardware.names)
            ]
            for kind in self.step.kinds
        }
        count, free = float(self.step.sends), 0.0 if by_rank else 1.0
        self.exposed = self.program.column("exposed", cost=count * free)
        self.fetch = self.program.column("forward fetch", cost=count * free)
        self.back = self.program.column("back", cost=free)
        self.optimizer = self.program.column("optimizer", cost=free)
        for name, columns in self.weights.items():
            self.program.row(name, dict.fromkeys(columns, 1.0), low=self.grid, high=self.grid)

    def _rooms(self) -> None:
        kinds = self.step.kinds
        for at, tier in enumerate(self.hardware.nodes):
            room = {self.weights[k.name][at]: k.bytes / self.grid / self._unit_b for k in kinds}
            high = (tier.usable_bytes - _ROOM_SLACK * len(kinds)) / self._unit_b
            self.program.row(f"room of {tier.name}", room, high=max(0.0, high))

    def _optimizer(self) -> None:
        """Three bounds: every tier, the CPU, the CPU with the latency of slower tiers."""
        hardware, step = self.hardware, self.step
        on_cpu = step.traffic / step.cpu_bytes_per_s / self._unit_s
        late: dict[int, float] = {}
        for at, tier in enumerate(hardware.nodes):
            moved = {
                self.weights[kind.name][at]: kind.traffic / self.grid / self._unit_s
                for kind in step.kinds
                if kind.traffic
            }
            busy = {column: each / tier.read_bytes_per_s for column, each in moved.items()}
            self.program.row(f"optimizer on {tier.name}", {**busy, self.optimizer: -1.0}, high=0.0)
            extra_ns = tier.latency_ns - hardware.local_latency_ns
            page_s = extra_ns * 1e-9 / PREFETCH_SPAN_BYTES / hardware.cores
            late |= {column: each * page_s for column, each in moved.items()}
        self.program.row("optimizer on the CPU", {self.optimizer: 1.0}, low=on_cpu)
        late[self.optimizer] = -1.0
        self.program.row("optimizer with latency", late, high=-on_cpu)

    def _copies(self) -> None:
        """Copies of staged gradients and of parameters, less what hides them."""
        step = self.step
        copies = [("staging", self.exposed, step.backward_s), ("staging", self.back, 0.0)]
        if step.stage == 3:
            copies = [copies[0], ("params", self.exposed, step.backward_s)]
            copies.append(("params", self.fetch, step.forward_s))
        for kind, column, behind in copies:
            hidden = behind - step.between_s
            at_link = step.low_bytes / self.hardware.link_bytes_per_s
            at_link = max(at_link, step.drive.fetch if kind == "params" else 0.0)
            self.program.row("link", {column: 1.0}, low=(at_link - hidden) / self._unit_s)
            for at, tier in enumerate(self.hardware.nodes):
                each = step.low_bytes / self.grid / tier.copy_bytes_per_s / self._unit_s
                terms = {self.weights[kind][at]: each, column: -1.0}
                self.program.row(f"copies of {tier.name}", terms, high=hidden / self._unit_s)


def _reduced(weights: list[int]) -> tuple[int, ...]:
    common = math.gcd(*weights)
    return tuple(weight // common for weight in weights)
