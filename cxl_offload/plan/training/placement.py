"""Which kind of training tensor goes to which tiers: a mixed-integer program over one step.

A kind is on one node, or interleaved by whole weights. The CPU streams optimizer states and
gradients, the GPU's copy engine the staging buffers; all tiers work at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.plan.equations.activation_bytes import ACTIVATIONS
from cxl_offload.plan.equations.copies import path_bytes_per_s
from cxl_offload.plan.equations.interleave import shares_of_weights
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.plan.solve import Program
from cxl_offload.plan.training.job import HostKind
from cxl_offload.plan.training.step import FP32_OVER_LOW
from cxl_offload.plan.training.step import TrainingStep as TrainingStep
from cxl_offload.plan.training.zero_offload import (
    PREFETCH_SPAN_BYTES,
    StepInputs,
    optimizer_seconds,
    step_times,
)
from cxl_offload.renamed import old_names

GRID = 8
"""Sum of the interleave weights of a kind."""

_ROUNDING = 1e-7
"""Share of a step by which the solver's answer may exceed the shortest."""

_ROOM_SLACK = 2 * HUGE_PAGE_BYTES
"""Bytes a kind may take beyond its share on a node: less than two granules."""

Weights = Mapping[str, tuple[int, ...]]
"""Kind -> interleave weights, one a node of the hardware."""


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Predicted seconds of a step taken apart.

    ``gradients_exposed_s`` and ``fetch_exposed_s`` are copies that outlast the backward and, of
    parameters that stage 3 fetches, the forward.
    """

    step_s: float
    forward_s: float
    backward_s: float
    gradients_exposed_s: float
    parameters_exposed_s: float
    optimizer_s: float
    drive_s: float = 0.0
    fetch_exposed_s: float = 0.0


def kind_bytes(kind: HostKind, weights: Sequence[int]) -> tuple[int, ...]:
    """Bytes of a kind on every node, as one tensor interleaved in the default granules."""
    used = {at: weight for at, weight in enumerate(weights) if weight}
    placed = {next(iter(used)): kind.bytes}
    if len(used) > 1:
        placed = stripe_bytes(kind.bytes, used, HUGE_PAGE_BYTES)
    return tuple(placed.get(at, 0) for at in range(len(weights)))


def _copy_seconds(hardware: Hardware, weights: Sequence[int], nbytes: float) -> float:
    """A copy from or to interleaved pages."""
    rates = [tier.copy_bytes_per_s for tier in hardware.nodes]
    return nbytes / path_bytes_per_s(hardware.link_bytes_per_s, rates, shares_of_weights(weights))


def _both_ways_bytes_per_s(hardware: Hardware, node: HostNode) -> float:
    """What a node gives to copies both ways together: the most that it is known to give."""
    return max(node.read_bytes_per_s, min(node.copy_bytes_per_s, hardware.link_bytes_per_s))


def _busiest_node_s(hardware: Hardware, weights: Weights, moved: Mapping[str, float]) -> float:
    """Copies of so many bytes of each kind, whichever way they go, on the node with most to do."""
    busy = [0.0] * len(hardware.nodes)
    for kind, nbytes in moved.items():
        for at, weight in enumerate(weights[kind]):
            rate = _both_ways_bytes_per_s(hardware, hardware.nodes[at])
            busy[at] += nbytes * weight / sum(weights[kind]) / rate
    return max(busy)


def estimate(step: TrainingStep, hardware: Hardware, weights: Weights) -> StepEstimate:
    """Seconds of a step, by the equations of ``training.zero_offload``.

    The copies of gradients of a micro-batch follow each other during its backward; stage 3 also
    fetches parameters for forward and backward, hidden behind them as far as they last, and in
    the same direction of the link as gradients that come back. Parameters return once. Checkpoints
    of activations leave beside the forward, and come back beside the backward in that direction.
    Directions of the link are apart, but no node gives more than its rate to both together.
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
    back = _copy_seconds(hardware, weights["staging"], step.low_bytes) + step.between_s
    fetch = 0.0
    if step.stage == 3:
        fetch = _copy_seconds(hardware, weights["params"], step.low_bytes)
        fetch = max(fetch, step.drive.fetch) + step.between_s
        back = 0.0  # parameters stay on the host
    kept = 0.0
    if step.activation_bytes:
        kept = _copy_seconds(hardware, weights[ACTIVATIONS], step.activation_bytes)
    late = _late_copies(step, hardware, weights, fetch=fetch, kept=kept)
    copied = max(fetch, kept, _busiest_node_s(hardware, weights, step.forward_bytes))
    in_forward = step.accumulation * max(0.0, copied - step.forward_s)
    work = step.accumulation * (step.forward_s + step.backward_s)
    return StepEstimate(
        step_s=work + late + in_forward + back + optimizer + step.drive_s,
        forward_s=step.accumulation * step.forward_s,
        backward_s=step.accumulation * step.backward_s,
        gradients_exposed_s=late,
        fetch_exposed_s=in_forward,
        parameters_exposed_s=back,
        optimizer_s=optimizer,
        drive_s=step.drive_s,
    )


def _late_copies(
    step: TrainingStep, hardware: Hardware, weights: Weights, *, fetch: float, kept: float
) -> float:
    """Seconds by which copies of gradients outlast the backwards of a step, and those to the GPU.

    Parameters
    ----------
    fetch, kept
        Seconds of a backward in which parameters, and checkpoints, are copied to the GPU.
    """
    low = float(step.low_bytes)
    added = _copy_seconds(hardware, weights[step.sum_kind], low)
    final = _copy_seconds(hardware, weights[step.final_kind], FP32_OVER_LOW * low)
    exposed = 0.0
    for each in step.copies:
        between = step.between_s if each.sends else 0.0
        gradients = (each.out + each.back) * added + each.final * final + between
        gradients += max(0.0, fetch - step.between_s) + kept if each.back_first else 0.0
        to_gpu = fetch + kept + each.back * added
        beside = max(gradients + step.edge * step.backward_s, to_gpu)
        beside = max(beside, _busiest_node_s(hardware, weights, step.backward_bytes(each)))
        late = step_times(StepInputs(0.0, step.backward_s, beside, 0.0, 0.0)).exposed_transfer_s
        exposed += each.passes * max(late, step.edge * gradients)
    return exposed


def least_step_s(step: TrainingStep, hardware: Hardware) -> float:
    """Seconds that no placement undercuts: those with nodes that nobody waits for."""
    ideal = replace(
        hardware.nodes[0],
        read_bytes_per_s=math.inf,
        copy_bytes_per_s=math.inf,
        latency_ns=hardware.local_latency_ns,
    )
    weights = {kind.name: (1,) for kind in step.kinds}
    return estimate(step, replace(hardware, nodes=(ideal,)), weights).step_s


def fastest(
    step: TrainingStep, hardware: Hardware, *, grid: int = GRID, most_s: float = math.inf
) -> tuple[Weights, StepEstimate] | None:
    """A placement with the shortest step, of several any; None where the host has no room.

    None also where it is sure to take longer than ``most_s``.
    """
    if least_step_s(step, hardware) > most_s * (1 + _ROUNDING):
        return None
    best = _solve(step, hardware, grid, None)
    if best is None:
        return None
    seconds = estimate(step, hardware, best)
    if seconds.step_s > most_s * (1 + _ROUNDING):
        return None
    return best, seconds


def nearest(
    step: TrainingStep,
    hardware: Hardware,
    weights: Weights,
    seconds: StepEstimate,
    *,
    grid: int = GRID,
) -> tuple[Weights, StepEstimate]:
    """The placement nearest to the front of the nodes, of those as fast as ``weights``.

    A search needs it of the step that it takes, and not of those that it compares.
    """
    found = _solve(step, hardware, grid, seconds.step_s * (1 + 1e-6))
    return (weights, seconds) if found is None else (found, estimate(step, hardware, found))


def _solve(
    step: TrainingStep, hardware: Hardware, grid: int, most_s: float | None
) -> Weights | None:
    """The fastest weights; with ``most_s`` the nearest ones that are as fast."""
    program = _StepProgram(step, hardware, grid, most_s)
    # presolve halves the time; it takes others of equally fast weights, which are told apart later
    found = program.program.solve(presolve=most_s is None)
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
            total = {column: count for column, count in self._seconds.items() if count}
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
        copies, free = self.step.copies, 0.0 if by_rank else 1.0
        self._seconds: dict[int, float] = {}

        def seconds(name: str, count: float) -> int:
            column = self.program.column(name, cost=count * free)
            self._seconds[column] = count
            return column

        self.exposed = [seconds(f"exposed {at}", each.passes) for at, each in enumerate(copies)]
        self.fetch = seconds("forward fetch", sum(each.passes for each in copies))
        self.back = seconds("back", 1.0)
        self.optimizer = seconds("optimizer", 1.0)
        self.added, self.final, self.fetched = (
            seconds(name, 0.0) for name in ("added", "final", "fetched")
        )
        self.kept = seconds("activations", 0.0) if self.step.activation_bytes else None
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
        """Copies of gradients and of parameters, less what hides them."""
        step, row = self.step, self.program.row
        self._copied(step.sum_kind, self.added)
        self._copied(step.final_kind, self.final, FP32_OVER_LOW)
        between, forward, backward = (
            each / self._unit_s for each in (step.between_s, step.forward_s, step.backward_s)
        )
        if step.stage == 3:
            self._copied("params", self.fetched)
            on_drive = step.drive.fetch / self._unit_s
            row("fetch from the drive", {self.fetched: 1.0}, low=on_drive)
            fetches = {self.fetched: 1.0, self.fetch: -1.0}
            row("fetch behind forward", fetches, high=forward - between)
        else:
            self._copied("staging", self.back, beside_s=step.between_s)
        if self.kept is not None:
            self._copied(ACTIVATIONS, self.kept, step.activation_bytes / step.low_bytes)
            row("activations behind forward", {self.kept: 1.0, self.fetch: -1.0}, high=forward)
        self._both_ways(step.forward_bytes, self.fetch, forward)
        self._behind_backward(between, backward)

    def _behind_backward(self, between: float, backward: float) -> None:
        """What each pass copies, less the backward; both in units of the program."""
        step, row = self.step, self.program.row
        for each, column in zip(step.copies, self.exposed, strict=True):
            out = {self.added: float(each.out + each.back), self.final: float(each.final)}
            to_gpu = {self.fetched: 1.0} if step.stage == 3 else {}
            to_gpu |= {} if self.kept is None else {self.kept: 1.0}
            if each.back_first:
                out |= to_gpu
            sent = between if each.sends else 0.0
            self._both_ways(step.backward_bytes(each), column, backward)
            hidden = (1 - step.edge) * backward - sent
            row("gradients", {**out, column: -1.0}, high=hidden)
            if step.edge:
                last = {which: step.edge * times for which, times in out.items()}
                row("of the last layer", {**last, column: -1.0}, high=-step.edge * sent)
            if to_gpu:
                to_gpu |= {self.added: float(each.back), column: -1.0}
                fetched = between if step.stage == 3 else 0.0
                row("fetch behind backward", to_gpu, high=backward - fetched)

    def _both_ways(self, moved: Mapping[str, float], exposed: int, hides: float) -> None:
        """``exposed`` is what nodes need for copies in both directions beyond the work beside."""
        for at, node in enumerate(self.hardware.nodes):
            seconds = 1 / _both_ways_bytes_per_s(self.hardware, node) / self.grid / self._unit_s
            terms = {self.weights[kind][at]: n * seconds for kind, n in moved.items() if n}
            if terms:
                self.program.row(f"copies on {node.name}", {**terms, exposed: -1.0}, high=hides)

    def _copied(
        self, kind: str, seconds: int, times: float = 1.0, *, beside_s: float = 0.0
    ) -> None:
        """``seconds`` lasts as long as a copy of ``times`` low-precision parameters."""
        nbytes = times * self.step.low_bytes
        at_link = (nbytes / self.hardware.link_bytes_per_s + beside_s) / self._unit_s
        self.program.row(f"link of {kind}", {seconds: 1.0}, low=at_link)
        for at, tier in enumerate(self.hardware.nodes):
            each = nbytes / self.grid / tier.copy_bytes_per_s / self._unit_s
            terms = {self.weights[kind][at]: each, seconds: -1.0}
            self.program.row(f"{kind} on {tier.name}", terms, high=-beside_s / self._unit_s)


def _reduced(weights: list[int]) -> tuple[int, ...]:
    common = math.gcd(*weights)
    return tuple(weight // common for weight in weights)


__getattr__ = old_names(__name__)
