"""Plans of training with DeepSpeed: micro-batch and accumulation, stage, tiers of every kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.compare import best_without_idle_tiers
from cxl_offload.plan.equations.adam_bytes import moment_bytes
from cxl_offload.plan.executor import Candidate, Executor, KindBytes, OwnFields
from cxl_offload.plan.hardware import NVME, Hardware
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, PhaseEstimate, Plan
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.training.adam_rate import about_optimizer
from cxl_offload.plan.training.assumed_gpu import ASSUMED_GPU, with_assumed_gpu
from cxl_offload.plan.training.drive import BUFFERS
from cxl_offload.plan.training.ds_config import CONFIG, config_text
from cxl_offload.plan.training.job import TrainingJob, gpu_bytes
from cxl_offload.plan.training.notes import (
    FLASH_NOTE,
    about_checkpoints,
    about_drive,
    about_gpu,
    about_states,
)
from cxl_offload.plan.training.placement import StepEstimate, kind_bytes
from cxl_offload.plan.training.request import TrainingRequest as TrainingRequest
from cxl_offload.plan.training.search import STAGES, PlannedStep, StepSearch
from cxl_offload.plan.training.state_choice import AS_FAST, AUTO, WIDEST_FIRST, ComparedTypes
from cxl_offload.plan.training.trace import equation_phases, planned_work, replayed_phases
from cxl_offload.plan.what_if import planned_as_if
from cxl_offload.renamed import old_names
from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.units import format_bytes

DRIVE_TERM = "reads and writes of the drive"


def plan_training(request: TrainingRequest) -> Plan:
    """The plan with the shortest step.

    Where the machine has no GPU one is assumed, and the plan is advice; its first note says which.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need.
    MemoryError
        The GPU does not hold one sequence, or the host not the optimizer.
    ValueError
        A batch or a sequence the model cannot have.
    """
    if AUTO in request.state_dtypes:
        compared = _compared(request)
        return make_plan(DeepSpeed(request, compared.chosen(), compared=compared))
    executors = [DeepSpeed(request, kept) for kept in ("", *dict.fromkeys(request.state_dtypes))]
    if len(executors) == 1:
        return make_plan(executors[0])
    found = [executor.search(executor.hardware()) for executor in executors]
    rates = [0.0 if best is None else best.tokens_per_s for best in found]
    enough = max(rates) * (1 - AS_FAST)
    return make_plan(executors[next(at for at, rate in enumerate(rates) if rate >= enough)])


def _compared(request: TrainingRequest) -> ComparedTypes:
    """The step that would be planned with each type of states, without tiers that bring little."""
    seconds: dict[str, float | None] = {}
    for kept in WIDEST_FIRST:
        seconds[kept] = None
        with contextlib.suppress(MemoryError):
            best, _, _ = best_without_idle_tiers(DeepSpeed(request, kept))
            seconds[kept] = best.choice.estimate.step_s
    return ComparedTypes(seconds, request.cxl_margin)


class DeepSpeed(Executor[PlannedStep]):
    """DeepSpeed's search and homes.

    Parameters
    ----------
    state_dtype
        What momentum and variance are kept as; empty: float32.
    compared
        What was compared where the planner chose it.
    """

    kind = "training"
    name = "deepspeed"

    def __init__(
        self,
        request: TrainingRequest,
        state_dtype: str = "",
        *,
        compared: ComparedTypes | None = None,
    ) -> None:
        machine, self._assumed = with_assumed_gpu(request.machine)
        request = replace(request, machine=machine)
        self._request, self._state_dtype, self._compared = request, state_dtype, compared
        self._job = TrainingJob(
            model=request.model,
            batch=request.batch // request.ranks.count,
            tokens=request.tokens,
            flash_attention=request.flash_attention,
        )
        self._space = StepSearch(request, self._job, state_dtype)
        if request.nvme_path is not None and not request.hardware().drive_usable_bytes:
            raise ConfigError(
                f"--nvme-path {request.nvme_path}: {request.machine.name} has no drive whose read "
                "rate is known, or the tiers leave nvme out; add it under drives of its file"
            )

    @property
    def request(self) -> TrainingRequest:
        """What is asked for, of a machine with a GPU."""
        return self._request

    def refusal(self) -> str | None:
        """That the machine lacks the GPU which is planned with."""
        return planned_as_if([f"GPU {ASSUMED_GPU}"]) if self._assumed else None

    def hardware(self) -> Hardware:
        """With the links of all GPUs of a host; with the drive where a folder of it is named."""
        found = self._request.hardware(gpus=self._request.ranks.gpus)
        if self._assumed:
            found = replace(found, notes=(self._assumed, *found.notes))
        return found.without(NVME) if self._request.nvme_path is None else found

    def search(
        self, hardware: Hardware, *, like: Candidate[PlannedStep] | None = None
    ) -> Candidate[PlannedStep] | None:
        """The shortest step."""
        return self._space.best(hardware)

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        job, request = self._job, self._request
        leave = request.offload_checkpoints
        least = min(gpu_bytes(job, 1, stage, offloaded=leave) for stage in self._space.stages)
        host = sum(kind.bytes for kind in self._space.kinds(request.stage or 2))
        rooms = ", ".join(f"{n.name} {format_bytes(n.usable_bytes)}" for n in hardware.nodes)
        if hardware.drive_usable_bytes:
            rooms += f", nvme {format_bytes(hardware.drive_usable_bytes)}"
        on_gpu, on_host = self._remedies(hardware)
        there = hardware.usable_bytes + hardware.drive_usable_bytes
        lacking = [*(on_gpu * (least > hardware.gpu_usable_bytes)), *(on_host * (host > there))]
        assumed = f" (GPU {ASSUMED_GPU} assumed)" if self._assumed else ""
        return (
            f"train {job.model.name} on {hardware.machine}: one sequence needs "
            f"{format_bytes(least)} of the GPU's usable {format_bytes(hardware.gpu_usable_bytes)}"
            f"{assumed}, and the optimizer {format_bytes(host)} of the host's usable {rooms}; "
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
        whole = {kind.name: kind.bytes for kind in self._space.kinds(found.choice.stage)}
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
        if not self._request.bind_cores:
            return ()
        return ("--bind_cores_to_rank", f"--bind_core_list={format_cpulist(cpus)}")

    def own_fields(self, found: Candidate[PlannedStep]) -> OwnFields:
        """DeepSpeed's own configuration, and what the hook of ``cxl-offload run`` does."""
        machine, choice = self._request.machine, found.choice
        text = config_text(
            stage=choice.stage,
            micro=choice.micro,
            accumulation=choice.step.accumulation,
            checkpointing=choice.checkpointing,
            on_drive=choice.on_drive,
            nvme_path=self._request.nvme_path,
            largest=self._space.largest,
        )
        cores = len(machine.node(machine.initiator).cpus)  # all of them update parameters
        return OwnFields(
            settings={CONFIG: text},
            threads={machine.initiator: cores} if cores else {},
            state_dtype=self._state_dtype,
            checkpointing=choice.checkpointing,
        )

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
        moment = moment_bytes(self._space.held, self._state_dtype) / self._space.held
        checkpointing = found.choice.checkpointing
        work = replace(work, checkpointing=checkpointing, moment_bytes=moment)
        return replayed_phases(replay, work, step, hardware, self.machine(found))

    def other_homes(
        self, found: Candidate[PlannedStep]
    ) -> Iterable[tuple[str, Candidate[PlannedStep] | None]]:
        """The other stages, and checkpoints that stay on the GPU."""
        if found.choice.step.activation_bytes:
            stays = replace(self._request, offload_checkpoints=False)
            other = DeepSpeed(stays, self._state_dtype)
            yield "with checkpoints on the GPU", other.search(found.hardware)
        for stage in STAGES if self._request.stage is None else ():
            if stage != found.choice.stage:
                other = DeepSpeed(replace(self._request, stage=stage), self._state_dtype)
                yield f"ZeRO stage {stage}", other.search(found.hardware)

    def notes(self, found: Candidate[PlannedStep]) -> list[str]:
        """What the script has to do, and what is not known."""
        request = self._request
        choice = found.choice
        checkpoints = about_checkpoints(choice.checkpointing, choice.step.activation_bytes)
        return [
            f"ZeRO stage {choice.stage}, bf16, {request.ranks}, {checkpoints}",
            *request.ranks.notes(),
            *about_drive(found.drive_bytes, request.nvme_path),
            *([FLASH_NOTE] if request.flash_attention else ()),
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory",
            about_states(self._state_dtype),
            *(self._compared.notes() if self._compared else ()),
            about_gpu(self._space.gpu_name),
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
