"""Plans of training with DeepSpeed: micro-batch and accumulation, stage, tiers of every kind."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.executor import Candidate, Executor, KindBytes
from cxl_offload.plan.gpu import TRAINING_EFFICIENCY
from cxl_offload.plan.hardware import GPU_USABLE, NVME, Hardware
from cxl_offload.plan.missing import MissingNumberError
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, PhaseEstimate, Plan
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.request import PlanRequest
from cxl_offload.plan.training.job import (
    GRADIENT_BUCKET_ELEMENTS,
    LOW_BYTES,
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
    kind_bytes,
    place,
)
from cxl_offload.plan.training.ranks import ONE_GPU, Ranks
from cxl_offload.plan.training.trace import equation_phases, planned_work, replayed_phases
from cxl_offload.units import format_bytes

ADAM_SHARE = 0.79
"""Share of the memory's rate that DeepSpeedCPUAdam reaches on torch's memory: measured with fp32
states, 50 M parameters and AVX-512 on a machine of two cores; the bound was the same traffic."""

ADAM_SHARE_OF_UPPER_BOUND = 0.26
"""The same where a machine file gives only an upper bound of its rate: 31 % of a step of GPT-2 8B
with batch 3 is the optimizer (Wang et al., Performance Characterization of CXL Memory, IV-A),
beside the GPU's work at the training efficiency that is planned with and sequences of 1024."""

STAGES: tuple[Stage, ...] = (2, 1, 3)
"""In the order in which one has to be faster than those before it."""

CONFIG = "ds_config.json"
"""DeepSpeed's configuration among a plan's settings, and as its command names it;
``cxl-offload run`` writes it."""


FLASH_NOTE = (
    "planned for attention that keeps no scores, which the script has to use (in transformers "
    'attn_implementation="flash_attention_2", or "sdpa" where torch takes its flash kernel)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(PlanRequest):
    """What is to be planned for DeepSpeed.

    Attributes
    ----------
    batch
        Sequences of one optimizer step; GPUs times micro-batch times accumulation.
    tokens
        Tokens of a sequence.
    stage
        1, 2, 3, or None: the fastest one.
    optimizer_bytes_per_s
        What the CPU optimizer draws from local memory; None: ``ADAM_SHARE`` of its rate, or
        ``ADAM_SHARE_OF_UPPER_BOUND``.
    script
        The training script of the printed command.
    ranks
        GPUs, and what crosses between them.
    flash_attention
        Whether the script's attention keeps no scores for the backward.
    """

    batch: int
    tokens: int
    stage: Stage | None = None
    optimizer_bytes_per_s: float | None = None
    script: str = "train.py"
    ranks: Ranks = ONE_GPU
    flash_attention: bool = False
    gpu_usable: float = GPU_USABLE

    def __post_init__(self) -> None:
        super(TrainingRequest, self).__post_init__()
        rate = self.optimizer_bytes_per_s
        if rate is not None and not 1e3 <= rate <= 1e15:
            raise ConfigError(f"optimizer rate {rate / 1e9:g} GB/s: from 1e-6 to 1e6")
        if self.batch % self.ranks.count:
            raise ConfigError(
                f"batch {self.batch} over {self.ranks.count} GPUs: a multiple of them is needed"
            )


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Micro-batch, stage and interleave weights of every kind, and what they take."""

    micro: int
    stage: Stage
    checkpointing: bool
    step: TrainingStep
    weights: Weights
    estimate: StepEstimate


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A micro-batch that the GPU holds, before anything is placed on the host."""

    micro: int
    checkpointing: bool
    gpu_bytes: int
    step: TrainingStep


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
    return make_plan(DeepSpeed(request))


class DeepSpeed(Executor[PlannedStep]):
    """DeepSpeed's search and homes."""

    kind = "training"
    name = "deepspeed"

    def __init__(self, request: TrainingRequest) -> None:
        self._request = request
        ranks, model = request.ranks, request.model
        self._job = TrainingJob(
            model=model,
            batch=request.batch // ranks.count,
            tokens=request.tokens,
            flash_attention=request.flash_attention,
        )
        self._held = -(-model.parameters // ranks.hosts)  # parameters whose states a host has
        if request.tiers is not None and NVME in request.tiers:
            raise ConfigError(
                "tier nvme: DeepSpeed's NVMe offload (swap_tensor) is not planned; leave it out"
            )

    @property
    def request(self) -> TrainingRequest:
        """What is asked for."""
        return self._request

    def hardware(self) -> Hardware:
        """Without the drive, and with the links of all GPUs of a host."""
        return self._request.hardware().without(NVME).of_gpus(self._request.ranks.gpus)

    def _between(self, hardware: Hardware) -> float:
        ranks, nbytes = self._request.ranks, LOW_BYTES * self._job.model.parameters
        return ranks.exchange_seconds(nbytes, hardware.link_bytes_per_s / ranks.gpus)

    def _optimizer_rate(self, hardware: Hardware) -> float:
        if self._request.optimizer_bytes_per_s is not None:
            return self._request.optimizer_bytes_per_s
        local = hardware.nodes[0]
        if local.read_bytes_per_s == float("inf"):
            raise MissingNumberError(
                f"machine {hardware.machine} has no read_bandwidth from its initiator to node "
                f"{local.node} ({local.name}); profile it, or give --optimizer-gb-s",
                section="accesses",
            )
        return self._adam_share() * local.read_bytes_per_s

    def _adam_share(self) -> float:
        machine = self._request.machine
        what = f"access {machine.initiator}->{machine.initiator} read bandwidth"
        bounds = [each.bound for each in machine.citations if each.what == what]
        return ADAM_SHARE_OF_UPPER_BOUND if "upper" in bounds else ADAM_SHARE

    def _steps(self, hardware: Hardware) -> Iterator[_Candidate]:
        """Micro-batches that the GPU holds, and what a step of them does."""
        job, rate = self._job, self._optimizer_rate(hardware)
        flops = hardware.gpu.flops_per_s * TRAINING_EFFICIENCY
        stages = STAGES if self._request.stage is None else (self._request.stage,)
        for stage, checkpointing in itertools.product(stages, (False, True)):
            forward, backward = (each / flops for each in job.flops(checkpointing=checkpointing))
            for micro in micro_batches(job):
                need = gpu_bytes(job, micro, stage, checkpointing=checkpointing)
                if need > hardware.gpu_usable_bytes:
                    break
                step = TrainingStep(
                    kinds=host_kinds(self._held, stage),
                    stage=stage,
                    forward_s=micro * forward,
                    backward_s=micro * backward,
                    accumulation=job.batch // micro,
                    cpu_bytes_per_s=rate,
                    between_s=self._between(hardware),
                )
                yield _Candidate(micro, checkpointing, need, step)

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
            placed = place(step, hardware)
            if placed is None:
                continue
            weights, estimate = placed
            if best is not None:
                slack = -1e-6 if each.checkpointing > best.checkpointing else 1e-6
                if STAGES.index(step.stage) > STAGES.index(best.stage):
                    slack = -self._request.cxl_margin
                if estimate.step_s > best.estimate.step_s * (1 + slack):
                    continue
            best = PlannedStep(each.micro, step.stage, each.checkpointing, step, weights, estimate)
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
        )

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        job, request = self._job, self._request
        stages = STAGES if request.stage is None else (request.stage,)
        least = min(gpu_bytes(job, 1, stage) for stage in stages)
        host = sum(kind.bytes for kind in host_kinds(self._held, request.stage or 2))
        rooms = ", ".join(f"{n.name} {format_bytes(n.usable_bytes)}" for n in hardware.nodes)
        return (
            f"train {job.model.name} on {hardware.machine}: one sequence needs "
            f"{format_bytes(least)} of the GPU's usable {format_bytes(hardware.gpu_usable_bytes)}, "
            f"and the optimizer {format_bytes(host)} of the host's usable {rooms}; shorten "
            "sequences or give more room"
        )

    def batch(self, found: Candidate[PlannedStep]) -> Batch:
        """Micro-batch and accumulation steps."""
        choice = found.choice
        count = choice.step.accumulation
        return Batch(size=choice.micro, count=count, prompt=0, tokens=self._job.tokens)

    def kinds(self, found: Candidate[PlannedStep]) -> Iterable[KindBytes]:
        """Host tensors; what the GPU holds is in its own bytes."""
        for kind in found.choice.step.kinds:
            weights = found.choice.weights[kind.name]
            policies = [_policy(found.hardware, weights)] * len(weights)
            yield KindBytes(kind.name, 0, kind_bytes(kind, weights), 0, policies)

    def command(self, found: Candidate[PlannedStep]) -> tuple[str, ...]:
        """DeepSpeed's launcher."""
        ranks = self._request.ranks
        start = ("deepspeed", *ranks.launcher_flags(), self._request.script, "--deepspeed")
        return (*start, "--deepspeed_config", CONFIG)

    def settings(self, found: Candidate[PlannedStep]) -> dict[str, str]:
        """DeepSpeed's own configuration."""
        return {CONFIG: _config(found.choice)}

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
        if self._request.ranks.count > 1:
            return {}
        return equation_phases(found.choice.estimate)

    def replayed_seconds(
        self, found: Candidate[PlannedStep], replay: Replay
    ) -> Mapping[str, float]:
        """One step of one GPU."""
        if self._request.ranks.count > 1:
            return {}
        step, weights, hardware = found.choice.step, found.choice.weights, found.hardware
        work = planned_work(self._job, step, hardware, weights)
        work = replace(work, checkpointing=found.choice.checkpointing)
        return replayed_phases(replay, work, step, hardware, self.machine(found))

    def other_homes(
        self, found: Candidate[PlannedStep]
    ) -> Iterable[tuple[str, Candidate[PlannedStep] | None]]:
        """The other stages."""
        for stage in STAGES if self._request.stage is None else ():
            if stage != found.choice.stage:
                other = DeepSpeed(replace(self._request, stage=stage))
                yield f"ZeRO stage {stage}", other.search(found.hardware)

    def notes(self, found: Candidate[PlannedStep]) -> list[str]:
        """What the script has to do, and what is not known."""
        request = self._request
        checkpoints = (
            "with activation checkpointing, which the script has to switch on (in transformers "
            "model.gradient_checkpointing_enable()): the micro-batch fits only so"
            if found.choice.checkpointing
            else "without activation checkpointing"
        )
        return [
            f"ZeRO stage {found.choice.stage}, bf16, {request.ranks}, {checkpoints}",
            *request.ranks.notes(),
            *([FLASH_NOTE] if request.flash_attention else ()),
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory",
            "the script gives the optimizer: DeepSpeedCPUAdam, or this package's CPUAdam",
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
        "transfers that no work hides": estimate.gradients_exposed_s,
        "parameters back to the GPU": estimate.parameters_exposed_s,
        "optimizer (CPU)": estimate.optimizer_s,
    }
    bottleneck = max(terms, key=lambda term: terms[term])
    step = PhaseEstimate(name="step", seconds=estimate.step_s, bottleneck=bottleneck, terms=terms)
    return (step,)


def _config(found: PlannedStep) -> str:
    """DeepSpeed's own configuration for the plan."""
    zero: dict[str, object] = {
        "stage": found.stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": GRADIENT_BUCKET_ELEMENTS,
    }
    if found.stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": found.micro,
        "gradient_accumulation_steps": found.step.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if found.checkpointing:
        config["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(config, indent=1)
