"""Plans of training with DeepSpeed: micro-batch and accumulation, stage, tiers of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.adam_bytes import moment_bytes
from cxl_offload.plan.executor import Candidate, Executor, KindBytes
from cxl_offload.plan.gpu import assumed_training_share
from cxl_offload.plan.hardware import NVME, Hardware
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, PhaseEstimate, Plan
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.training.adam_rate import about_optimizer, optimizer_rate
from cxl_offload.plan.training.drive import BUFFERS, NOWHERE, OnDrive, choices, kinds_in_memory
from cxl_offload.plan.training.ds_config import CONFIG, config_text
from cxl_offload.plan.training.job import (
    LOW_BYTES,
    HostKind,
    Stage,
    TrainingJob,
    gpu_bytes,
    host_kinds,
    micro_batches,
)
from cxl_offload.plan.training.notes import (
    FLASH_NOTE,
    about_checkpoints,
    about_drive,
    about_gpu,
    about_states,
)
from cxl_offload.plan.training.placement import (
    StepEstimate,
    TrainingStep,
    Weights,
    kind_bytes,
    place,
)
from cxl_offload.plan.training.request import TrainingRequest as TrainingRequest
from cxl_offload.plan.training.trace import equation_phases, planned_work, replayed_phases
from cxl_offload.renamed import old_names
from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.units import format_bytes

STAGES: tuple[Stage, ...] = (2, 1, 3)
"""In the order in which one has to be faster than those before it."""

_AS_FAST = 1e-6
"""States in fewer bytes have to be faster by more than this share: they lose precision."""

DRIVE_TERM = "reads and writes of the drive"


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
class _Candidate:
    """A micro-batch that the GPU holds, before anything is placed on the host."""

    micro: int
    checkpointing: bool
    gpu_bytes: int
    step: TrainingStep
    on_drive: OnDrive
    drive_bytes: int


def plan_training(request: TrainingRequest) -> Plan:
    """The plan with the shortest step.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need.
    MemoryError
        The GPU does not hold one sequence, or the host not the optimizer.
    ValueError
        A batch or a sequence the model cannot have.
    """
    executors = [DeepSpeed(request, kept) for kept in ("", *dict.fromkeys(request.state_dtypes))]
    if len(executors) == 1:
        return make_plan(executors[0])
    found = [executor.search(executor.hardware()) for executor in executors]
    rates = [0.0 if best is None else best.tokens_per_s for best in found]
    enough = max(rates) * (1 - _AS_FAST)
    return make_plan(executors[next(at for at, rate in enumerate(rates) if rate >= enough)])


class DeepSpeed(Executor[PlannedStep]):
    """DeepSpeed's search and homes.

    Parameters
    ----------
    state_dtype
        What momentum and variance are kept as; empty: float32.
    """

    kind = "training"
    name = "deepspeed"

    def __init__(self, request: TrainingRequest, state_dtype: str = "") -> None:
        self._request, self._state_dtype = request, state_dtype
        ranks, model = request.ranks, request.model
        self._job = TrainingJob(
            model=model,
            batch=request.batch // ranks.count,
            tokens=request.tokens,
            flash_attention=request.flash_attention,
        )
        self._held = -(-model.parameters // ranks.hosts)  # parameters whose states a host has
        self._largest = max(tensor.elements // tensor.count for tensor in model.tensors())
        if request.nvme_path is None and NVME in (request.tiers or ()):
            raise ConfigError("tier nvme: name a folder of the drive by --nvme-path")
        if request.nvme_path is not None and not request.hardware().drive_usable_bytes:
            raise ConfigError(
                f"--nvme-path {request.nvme_path}: {request.machine.name} has no drive whose read "
                "rate is known, or the tiers leave nvme out; add it under drives of its file"
            )

    @property
    def request(self) -> TrainingRequest:
        """What is asked for."""
        return self._request

    def hardware(self) -> Hardware:
        """With the links of all GPUs of a host; with the drive where a folder of it is named."""
        found = self._request.hardware().of_gpus(self._request.ranks.gpus)
        return found.without(NVME) if self._request.nvme_path is None else found

    @property
    def _gpu_name(self) -> str:
        gpus = self._request.machine.gpus
        return f"{gpus[0].name} {gpus[0].model}".rstrip() if gpus else ""

    def _between(self, hardware: Hardware) -> float:
        ranks, nbytes = self._request.ranks, LOW_BYTES * self._job.model.parameters
        return ranks.exchange_seconds(nbytes, hardware.link_bytes_per_s / ranks.gpus)

    def _kinds(self, stage: Stage, accumulation: int = 1) -> tuple[HostKind, ...]:
        return host_kinds(self._held, stage, accumulation, state_dtype=self._state_dtype)

    def _places(self, stage: Stage, hardware: Hardware) -> Iterable[OnDrive]:
        """What may be on the drive: DeepSpeed reads states in float32 there and no others."""
        return [
            each for each in choices(stage, hardware) if not (each.optimizer and self._state_dtype)
        ]

    def _steps(self, hardware: Hardware) -> Iterator[_Candidate]:
        """Micro-batches that the GPU holds, and what a step of them does."""
        job, gpus = self._job, self._request.ranks.gpus
        rate = optimizer_rate(self._request, hardware)
        share = assumed_training_share(self._gpu_name)
        stages = STAGES if self._request.stage is None else (self._request.stage,)
        for stage, checkpointing in itertools.product(stages, (False, True)):
            for micro in micro_batches(job):
                need = gpu_bytes(job, micro, stage, checkpointing=checkpointing)
                if need > hardware.gpu_usable_bytes:
                    break
                passes = job.passes(hardware.gpu, share, micro=micro, checkpointing=checkpointing)
                kinds = self._kinds(stage, job.batch // micro)
                for there in self._places(stage, hardware):
                    step = TrainingStep(
                        kinds=kinds_in_memory(kinds, there, gpus=gpus, largest=self._largest),
                        stage=stage,
                        forward_s=passes.forward_s,
                        backward_s=passes.backward_s,
                        accumulation=job.batch // micro,
                        cpu_bytes_per_s=rate,
                        between_s=self._between(hardware),
                        drive=there.seconds(kinds, hardware),
                        edge=1 / (job.model.layers + 1),  # with the head
                    )
                    yield _Candidate(micro, checkpointing, need, step, there, there.nbytes(kinds))

    def search(
        self, hardware: Hardware, *, like: Candidate[PlannedStep] | None = None
    ) -> Candidate[PlannedStep] | None:
        """The shortest step; of equals the largest micro-batch, without checkpointing if it can be.

        Stages 1 and 3 have to bring more than the margin: how much less small micro-batches reach
        of the GPU, and what gathers cost beside the copies, is not in the equations.
        """
        best: PlannedStep | None = None
        need = 0
        for each in self._steps(hardware):
            step = each.step
            most_s = float("inf")
            if best is not None:
                slack = -1e-6 if each.checkpointing > best.checkpointing else 1e-6
                if STAGES.index(step.stage) > STAGES.index(best.stage):
                    slack = -self._request.cxl_margin
                most_s = best.estimate.step_s * (1 + slack)
            placed = place(step, hardware, most_s=most_s)
            fits = each.drive_bytes <= hardware.drive_usable_bytes
            if placed is None or placed[1].step_s > most_s or not fits:
                continue
            best = PlannedStep(
                each.micro, step.stage, each.checkpointing, step, *placed,
                each.on_drive, each.drive_bytes,
            )  # fmt: skip
            need = each.gpu_bytes
        if best is None:
            return None
        job = self._job
        host = [0] * len(hardware.nodes)
        for kind in best.step.kinds:
            for at, nbytes in enumerate(kind_bytes(kind, best.weights[kind.name])):
                host[at] += nbytes
        return Candidate(
            hardware=hardware,
            choice=best,
            tokens_per_s=self._request.batch * job.tokens / best.estimate.step_s,
            sequences=best.micro,
            host=tuple(host),
            gpu_bytes=need,
            drive_bytes=best.drive_bytes,
        )

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        job, request = self._job, self._request
        stages = STAGES if request.stage is None else (request.stage,)
        least = min(gpu_bytes(job, 1, stage) for stage in stages)
        host = sum(kind.bytes for kind in self._kinds(request.stage or 2))
        rooms = ", ".join(f"{n.name} {format_bytes(n.usable_bytes)}" for n in hardware.nodes)
        if hardware.drive_usable_bytes:
            rooms += f", nvme {format_bytes(hardware.drive_usable_bytes)}"
        on_gpu, on_host = self._remedies(hardware)
        there = sum(node.usable_bytes for node in hardware.nodes) + hardware.drive_usable_bytes
        lacking = [*(on_gpu * (least > hardware.gpu_usable_bytes)), *(on_host * (host > there))]
        return (
            f"train {job.model.name} on {hardware.machine}: one sequence needs "
            f"{format_bytes(least)} of the GPU's usable {format_bytes(hardware.gpu_usable_bytes)}, "
            f"and the optimizer {format_bytes(host)} of the host's usable {rooms}; "
            f"{' and '.join(lacking or [*on_gpu, *on_host])}"
        )

    def _remedies(self, hardware: Hardware) -> tuple[list[str], list[str]]:
        """What would make room on the GPU, and what on the host."""
        job, request = self._job, self._request
        stages = STAGES if request.stage is None else (request.stage,)
        shortest = min(gpu_bytes(replace(job, tokens=1), 1, stage) for stage in stages)
        on_gpu = "plan with more of the GPU (--gpu-usable) or another one (--gpu)"
        if shortest <= hardware.gpu_usable_bytes:
            on_gpu = "shorten sequences (--seq-len)"
        on_host = "give the host more memory (--add)"
        if not hardware.drive_usable_bytes and request.stage in (None, 3):
            on_host += " or a folder on a drive (--nvme-path)"
        return [on_gpu], [on_host]

    def batch(self, found: Candidate[PlannedStep]) -> Batch:
        """Micro-batch and accumulation steps."""
        choice = found.choice
        count = choice.step.accumulation
        return Batch(size=choice.micro, count=count, prompt=0, tokens=self._job.tokens)

    def kinds(self, found: Candidate[PlannedStep]) -> Iterable[KindBytes]:
        """Host tensors; what the GPU holds is in its own bytes."""
        there, none = found.choice.on_drive.kinds, (0,) * len(found.hardware.nodes)
        whole = {kind.name: kind.bytes for kind in self._kinds(found.choice.stage)}
        for kind in found.choice.step.kinds:
            weights = found.choice.weights[kind.name]
            drive = whole[kind.name] if kind.name in there else 0
            is_placed = kind.name != BUFFERS and not drive
            policy = _policy(found.hardware, weights) if is_placed else ""
            yield KindBytes(kind.name, 0, kind_bytes(kind, weights), drive, [policy] * len(weights))
        for name in sorted(set(there) - found.choice.weights.keys()):
            yield KindBytes(name, 0, none, whole[name], [""] * len(none))

    def command(self, found: Candidate[PlannedStep]) -> tuple[str, ...]:
        """DeepSpeed's launcher."""
        ranks = self._request.ranks
        flags = (*ranks.launcher_flags(), *self._binding())
        start = ("deepspeed", *flags, self._request.script, "--deepspeed")
        return (*start, "--deepspeed_config", CONFIG)

    def _binding(self) -> tuple[str, ...]:
        """Of the launcher: ranks divide the cores that the optimizer's rate is of."""
        machine = self._request.machine
        cpus = machine.node(machine.initiator).cpus
        if not self._request.bind_cores or not cpus:
            return ()
        return ("--bind_cores_to_rank", f"--bind_core_list={format_cpulist(cpus)}")

    def settings(self, found: Candidate[PlannedStep]) -> dict[str, str]:
        """DeepSpeed's own configuration."""
        choice = found.choice
        text = config_text(
            stage=choice.stage,
            micro=choice.micro,
            accumulation=choice.step.accumulation,
            checkpointing=choice.checkpointing,
            on_drive=choice.on_drive,
            nvme_path=self._request.nvme_path,
            largest=self._largest,
        )
        return {CONFIG: text}

    def state_dtype(self) -> str:
        """What momentum and variance are kept as; empty: float32."""
        return self._state_dtype

    def checkpointing(self, found: Candidate[PlannedStep]) -> bool:
        """Whether the micro-batch fits only with checkpoints."""
        return found.choice.checkpointing

    def threads(self, found: Candidate[PlannedStep]) -> dict[int, int]:
        """All cores of the initiator update parameters."""
        machine = self._request.machine
        cores = len(machine.node(machine.initiator).cpus)
        return {machine.initiator: cores} if cores else {}

    def phases(self, found: Candidate[PlannedStep]) -> tuple[PhaseEstimate, ...]:
        """One step."""
        return _phases(found.choice.estimate)

    def equation_seconds(self, found: Candidate[PlannedStep]) -> Mapping[str, float]:
        """Predicted seconds by phase; the simulator has one GPU."""
        if self._request.ranks.count > 1 or found.drive_bytes:
            return {}
        return equation_phases(found.choice.estimate)

    def replayed_seconds(
        self, found: Candidate[PlannedStep], replay: Replay
    ) -> Mapping[str, float]:
        """One step of one GPU."""
        if self._request.ranks.count > 1 or found.drive_bytes:
            return {}
        step, weights, hardware = found.choice.step, found.choice.weights, found.hardware
        work = planned_work(self._job, step, hardware, weights)
        moment = moment_bytes(self._held, self._state_dtype) / self._held
        checkpointing = found.choice.checkpointing
        work = replace(work, checkpointing=checkpointing, moment_bytes=moment)
        return replayed_phases(replay, work, step, hardware, self.machine(found))

    def other_homes(
        self, found: Candidate[PlannedStep]
    ) -> Iterable[tuple[str, Candidate[PlannedStep] | None]]:
        """The other stages."""
        for stage in STAGES if self._request.stage is None else ():
            if stage != found.choice.stage:
                other = DeepSpeed(replace(self._request, stage=stage), self._state_dtype)
                yield f"ZeRO stage {stage}", other.search(found.hardware)

    def notes(self, found: Candidate[PlannedStep]) -> list[str]:
        """What the script has to do, and what is not known."""
        request = self._request
        checkpoints = about_checkpoints(found.choice.checkpointing)
        return [
            f"ZeRO stage {found.choice.stage}, bf16, {request.ranks}, {checkpoints}",
            *request.ranks.notes(),
            *about_drive(found.drive_bytes, request.nvme_path),
            *([FLASH_NOTE] if request.flash_attention else ()),
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory",
            about_states(self._state_dtype),
            about_gpu(self._gpu_name),
            *about_optimizer(request, found.hardware),
            "no absolute step time is published for these machines, so no error is known",
        ]


def _policy(hardware: Hardware, weights: Sequence[int]) -> str:
    used = [(name, w) for name, w in zip(hardware.names, weights, strict=True) if w]
    if len(used) == 1:
        return f"bind:{used[0][0]}"
    return "weighted:" + ",".join(f"{name}={weight}" for name, weight in used)


def _phases(estimate: StepEstimate) -> tuple[PhaseEstimate, ...]:
    terms = {
        "forward (GPU)": estimate.forward_s,
        "backward (GPU)": estimate.backward_s,
        "transfers that no work hides": estimate.gradients_exposed_s + estimate.fetch_exposed_s,
        "parameters back to the GPU": estimate.parameters_exposed_s,
        "optimizer (CPU)": estimate.optimizer_s,
        **({DRIVE_TERM: estimate.drive_s} if estimate.drive_s else {}),
    }
    bottleneck = max(terms, key=lambda term: terms[term])
    step = PhaseEstimate(name="step", seconds=estimate.step_s, bottleneck=bottleneck, terms=terms)
    return (step,)


__getattr__ = old_names(__name__)
