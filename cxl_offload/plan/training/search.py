"""The shortest step of a training: micro-batch and stage, what is computed again, places of all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cxl_offload.plan.equations.activation_bytes import ACTIVATIONS
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.gpu import assumed_training_share
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.training.adam_rate import optimizer_rate
from cxl_offload.plan.training.drive import NOWHERE, OnDrive, choices, kinds_in_memory
from cxl_offload.plan.training.job import (
    LOW_BYTES,
    HostKind,
    Stage,
    TrainingJob,
    gpu_bytes,
    host_kinds,
    micro_batches,
)
from cxl_offload.plan.training.placement import (
    StepEstimate,
    TrainingStep,
    Weights,
    fastest,
    kind_bytes,
    nearest,
)
from cxl_offload.plan.training.request import TrainingRequest
from cxl_offload.plan.training.state_choice import AS_FAST

STAGES: tuple[Stage, ...] = (2, 1, 3)
"""In the order in which one has to be faster than those before it."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Micro-batch, stage and interleave weights of every kind, and what they take."""

    micro: int
    stage: Stage
    checkpointing: bool
    step: TrainingStep
    weights: Weights
    estimate: StepEstimate
    on_drive: OnDrive = NOWHERE
    drive_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A micro-batch that the GPU holds, before anything is placed on the host."""

    micro: int
    checkpointing: bool
    gpu_bytes: int
    step: TrainingStep
    on_drive: OnDrive
    drive_bytes: int


class StepSearch:
    """All steps of a request with optimizer states of one type, and the shortest.

    Parameters
    ----------
    state_dtype
        What momentum and variance are kept as; empty: float32.
    """

    def __init__(self, request: TrainingRequest, job: TrainingJob, state_dtype: str) -> None:
        self._request, self._job, self._state_dtype = request, job, state_dtype
        model = job.model
        self.held = -(-model.parameters // request.ranks.hosts)
        """Parameters whose states a host has."""
        self.largest = max(tensor.elements // tensor.count for tensor in model.tensors())
        """Elements of the largest parameter."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that are allowed."""
        return STAGES if self._request.stage is None else (self._request.stage,)

    @property
    def gpu_name(self) -> str:
        """Whose share of the peak is planned with."""
        gpus = self._request.machine.gpus
        return f"{gpus[0].name} {gpus[0].model}".rstrip() if gpus else ""

    def kinds(self, stage: Stage, accumulation: int = 1) -> tuple[HostKind, ...]:
        """Of host tensors, wherever they are."""
        return host_kinds(self.held, stage, accumulation, state_dtype=self._state_dtype)

    def steps(self, hardware: Hardware) -> Iterator[StepChoice]:
        """Micro-batches that the GPU holds, and what a step of them does."""
        job, gpus = self._job, self._request.ranks.gpus
        rate = optimizer_rate(self._request, hardware)
        share = assumed_training_share(self.gpu_name)
        ways = [(False, each) for each in itertools.product(self.stages, (False, True))]
        if self._request.offload_checkpoints:
            ways += [(True, (stage, True)) for stage in self.stages]
        for offloaded, (stage, checkpointing) in ways:
            for micro, need in self._micro_batches(
                stage, hardware, checkpointing=checkpointing, offloaded=offloaded
            ):
                passes = job.passes(hardware.gpu, share, micro=micro, checkpointing=checkpointing)
                kinds = self.kinds(stage, job.batch // micro)
                if offloaded:
                    nbytes = gpus * job.checkpoint_bytes(micro)
                    kinds = (*kinds, HostKind(ACTIVATIONS, nbytes, 0.0, copied=True))
                for there in self._places(stage, hardware):
                    step = TrainingStep(
                        kinds=kinds_in_memory(kinds, there, gpus=gpus, largest=self.largest),
                        stage=stage,
                        forward_s=passes.forward_s,
                        backward_s=passes.backward_s,
                        accumulation=job.batch // micro,
                        cpu_bytes_per_s=rate,
                        between_s=self._between(hardware),
                        drive=there.seconds(kinds, hardware),
                        edge=1 / (job.model.layers + 1),  # with the head
                    )
                    yield StepChoice(micro, checkpointing, need, step, there, there.nbytes(kinds))

    def _micro_batches(
        self, stage: Stage, hardware: Hardware, *, checkpointing: bool, offloaded: bool
    ) -> Iterator[tuple[int, int]]:
        """Those that the GPU holds, and the bytes there; offloaded only where it does not else.

        Checkpoints that are too small to leave are never offloaded, since that frees nothing. A
        larger micro-batch, whose checkpoints do leave, may need less.
        """
        job, room = self._job, hardware.gpu_usable_bytes
        for micro in micro_batches(job):
            if offloaded and gpu_bytes(job, micro, stage) <= room:
                continue
            need = gpu_bytes(job, micro, stage, checkpointing=checkpointing, offloaded=offloaded)
            if need <= room:
                yield micro, need

    def best(self, hardware: Hardware) -> Candidate[PlannedStep] | None:
        """The shortest step; of equals the largest micro-batch, without checkpointing if it can be.

        Stages 1 and 3 have to bring more than the margin: how much less small micro-batches reach
        of the GPU, and what gathers cost beside the copies, is not in the equations. So have
        checkpoints on the host, over the best step without them.
        """
        best: PlannedStep | None = None
        need = 0
        for _, group in itertools.groupby(self.steps(hardware), key=_alike):
            choices = list(group)
            found = _shortest(choices, hardware, self._most_s(choices[0], best))
            if found is not None:
                best, need = found
        if best is None:
            return None
        weights, estimate = nearest(best.step, hardware, best.weights, best.estimate)
        return self._candidate(hardware, replace(best, weights=weights, estimate=estimate), need)

    def _most_s(self, each: StepChoice, best: PlannedStep | None) -> float:
        """Seconds that a step may take to be preferred to the best of other groups."""
        if best is None:
            return math.inf
        slack = -AS_FAST if each.checkpointing > best.checkpointing else AS_FAST
        leaves = bool(each.step.activation_bytes) > bool(best.step.activation_bytes)
        if leaves or STAGES.index(each.step.stage) > STAGES.index(best.stage):
            slack = -self._request.cxl_margin
        return best.estimate.step_s * (1 + slack)

    def _candidate(
        self, hardware: Hardware, best: PlannedStep, need: int
    ) -> Candidate[PlannedStep]:
        host = [0] * len(hardware.nodes)
        for kind in best.step.kinds:
            for at, nbytes in enumerate(kind_bytes(kind, best.weights[kind.name])):
                host[at] += nbytes
        return Candidate(
            hardware=hardware,
            choice=best,
            tokens_per_s=self._request.batch * self._job.tokens / best.estimate.step_s,
            sequences=best.micro,
            host=tuple(host),
            gpu_bytes=need,
            drive_bytes=best.drive_bytes,
        )

    def _between(self, hardware: Hardware) -> float:
        ranks, nbytes = self._request.ranks, LOW_BYTES * self._job.model.parameters
        return ranks.exchange_seconds(nbytes, hardware.link_bytes_per_s / ranks.gpus)

    def _places(self, stage: Stage, hardware: Hardware) -> Iterable[OnDrive]:
        """What may be on the drive: DeepSpeed reads states in float32 there and no others."""
        return [
            each for each in choices(stage, hardware) if not (each.optimizer and self._state_dtype)
        ]


def _alike(each: StepChoice) -> tuple[Stage, bool, bool]:
    """Steps that differ in this are not told apart by their seconds alone."""
    return each.step.stage, each.checkpointing, bool(each.step.activation_bytes)


def _shortest(
    choices: Sequence[StepChoice], hardware: Hardware, most_s: float
) -> tuple[PlannedStep, int] | None:
    """The shortest of steps that are alike, of equals the last, and the GPU's bytes.

    The last has the largest micro-batch, which is mostly the fastest: few of the others are placed.
    """
    found: tuple[PlannedStep, int] | None = None
    for each in reversed(choices):
        if each.drive_bytes > hardware.drive_usable_bytes:
            continue
        placed = fastest(each.step, hardware, most_s=most_s)
        if placed is None or placed[1].step_s > most_s:
            continue
        planned = PlannedStep(
            each.micro, each.step.stage, each.checkpointing, each.step, *placed,
            each.on_drive, each.drive_bytes,
        )  # fmt: skip
        found, most_s = (planned, each.gpu_bytes), placed[1].step_s * (1 - AS_FAST)
    return found
