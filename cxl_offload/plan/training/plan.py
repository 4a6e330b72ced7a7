"""Plans of training with DeepSpeed: micro-batch and accumulation, stage, tiers of every kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import CXL, CXL_MARGIN
from cxl_offload.plan.flexgen.prices import knobs
from cxl_offload.plan.gpu import TRAINING_EFFICIENCY
from cxl_offload.plan.hardware import (
    GPU_USABLE,
    HOST_USABLE,
    NVME,
    Hardware,
    hardware_of,
)
from cxl_offload.plan.missing import MissingNumberError
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.plan_file import (
    Batch,
    CxlUse,
    Home,
    PhaseEstimate,
    Plan,
    PriceEstimate,
)
from cxl_offload.plan.replay_check import Replay, disagreements, simulated_seconds
from cxl_offload.plan.training.job import (
    GRADIENT_BUCKET_ELEMENTS,
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
from cxl_offload.plan.training.trace import equation_phases, planned_work, replayed_phases
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes

__all__ = ["ADAM_SHARE", "TrainingRequest", "plan_training"]

ADAM_SHARE = 0.79
"""Share of the memory's rate that DeepSpeedCPUAdam reaches on torch's memory: measured with fp32
states, 50 M parameters and AVX-512 on a machine of two cores; the bound was the same traffic."""

STAGES: tuple[Stage, ...] = (2, 3)

CONFIG = "ds_config.json"
"""DeepSpeed's configuration among a plan's settings, and as its command names it;
``cxl-offload run`` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What is to be planned for DeepSpeed on one GPU.

    Attributes
    ----------
    batch
        Sequences of one optimizer step; micro-batch times accumulation.
    tokens
        Tokens of a sequence.
    stage
        2, 3, or None: 2 where the GPU holds the parameters, else 3.
    optimizer_bytes_per_s
        What the CPU optimizer draws from local memory; None: ``ADAM_SHARE`` of its rate.
    script
        The training script of the printed command.
    replay
        Charges time for the step's bytes apart from the equations, the simulator by default; where
        it differs by more than 10 % the plan's notes say so. None: no replay.
    """

    model: ModelConfig
    machine: Machine
    batch: int
    tokens: int
    stage: Stage | None = None
    tiers: Sequence[str] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    optimizer_bytes_per_s: float | None = None
    script: str = "train.py"
    host_usable: float = HOST_USABLE
    gpu_usable: float = GPU_USABLE
    cxl_margin: float = CXL_MARGIN
    replay: Replay | None = simulated_seconds


@dataclass(frozen=True, slots=True)
class _Found:
    micro: int
    stage: Stage
    step: TrainingStep
    weights: Weights
    estimate: StepEstimate
    hardware: Hardware
    gpu_bytes: int


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
    job = TrainingJob(model=request.model, batch=request.batch, tokens=request.tokens)
    tiers = request.tiers
    if tiers is not None and NVME in tiers:
        raise ConfigError(
            "tier nvme: DeepSpeed's NVMe offload (swap_tensor) is not planned; leave it out"
        )
    hardware = hardware_of(
        request.machine,
        tiers=tiers,
        limits=request.limits,
        host_usable=request.host_usable,
        gpu_usable=request.gpu_usable,
    )
    hardware = hardware.without(NVME)
    found, cxl = _weigh_cxl(request, job, hardware)
    return _plan(request, job, found, cxl)


def _cpu_rate(request: TrainingRequest, hardware: Hardware) -> float:
    if request.optimizer_bytes_per_s is not None:
        if request.optimizer_bytes_per_s <= 0:
            raise ConfigError("optimizer rate: above 0 GB/s")
        return request.optimizer_bytes_per_s
    local = hardware.nodes[0]
    if local.read_bytes_per_s == float("inf"):
        raise MissingNumberError(
            f"machine {hardware.machine} has no read_bandwidth from its initiator to node "
            f"{local.node} ({local.name}); profile it, or give --optimizer-gb-s",
            section="accesses",
        )
    return ADAM_SHARE * local.read_bytes_per_s


def _search(
    request: TrainingRequest, job: TrainingJob, hardware: Hardware, cpu_rate: float
) -> _Found | None:
    if not hardware.nodes:
        return None
    best: _Found | None = None
    flops = hardware.gpu.flops_per_s * TRAINING_EFFICIENCY
    forward, backward = (each / flops for each in job.flops)
    for stage in STAGES if request.stage is None else (request.stage,):
        for micro in micro_batches(job):
            held = gpu_bytes(job, micro, stage)
            if held > hardware.gpu_usable_bytes:
                break
            step = TrainingStep(
                kinds=host_kinds(job.model.parameters, stage),
                stage=stage,
                forward_s=micro * forward,
                backward_s=micro * backward,
                accumulation=job.batch // micro,
                cpu_bytes_per_s=cpu_rate,
            )
            placed = place(step, hardware)
            if placed is None:
                break
            weights, estimate = placed
            if best is None or estimate.step_s < best.estimate.step_s * (1 - 1e-6):
                best = _Found(micro, stage, step, weights, estimate, hardware, held)
        if best is not None:  # stage 3 costs gathers that the equations leave out
            return best
    return None


def _weigh_cxl(
    request: TrainingRequest, job: TrainingJob, hardware: Hardware
) -> tuple[_Found, CxlUse]:
    cpu_rate = _cpu_rate(request, hardware)
    best = _search(request, job, hardware, cpu_rate)
    if best is None:
        raise MemoryError(_does_not_fit(request, job, hardware))
    cxl = [at for at, tier in enumerate(hardware.nodes) if tier.tier == CXL]
    if not cxl:
        return best, CxlUse(used=False, gain=None, reason="there is no CXL tier to use")
    used = any(weights[at] for weights in best.weights.values() for at in cxl)
    without = _search(request, job, hardware.without(CXL), cpu_rate)
    if without is None:
        reason = "without CXL memory the optimizer does not fit on the host"
        return best, CxlUse(used=used, gain=None, reason=reason)
    gain = without.estimate.step_s / best.estimate.step_s - 1
    if used and gain >= max(request.cxl_margin, 1e-12):
        reason = "its bandwidth adds to that of the other tiers"
        return best, CxlUse(used=True, gain=gain, reason=reason)
    reason = "training batches are bound by the GPU, and other memory holds the optimizer"
    if used:
        reason = f"it adds {gain:.1%}, below the margin of {request.cxl_margin:.1%}; {reason}"
    return without, CxlUse(used=False, gain=max(0.0, gain), reason=reason)


def _does_not_fit(request: TrainingRequest, job: TrainingJob, hardware: Hardware) -> str:
    stage: Stage = request.stage or 3
    least = gpu_bytes(job, 1, stage)
    host = sum(kind.bytes for kind in host_kinds(job.model.parameters, request.stage or 2))
    rooms = ", ".join(f"{tier.name} {format_bytes(tier.usable_bytes)}" for tier in hardware.nodes)
    return (
        f"train {job.model.name} on {hardware.machine}: one sequence needs {format_bytes(least)} "
        f"of the GPU's usable {format_bytes(hardware.gpu_usable_bytes)}, and the optimizer "
        f"{format_bytes(host)} of the host's usable {rooms}; shorten sequences or give more room"
    )


def _policy(hardware: Hardware, weights: Sequence[int]) -> str:
    used = [(name, w) for name, w in zip(hardware.names, weights, strict=True) if w]
    if len(used) == 1:
        return f"bind:{used[0][0]}"
    return "weighted:" + ",".join(f"{name}={weight}" for name, weight in used)


def _plan(request: TrainingRequest, job: TrainingJob, found: _Found, cxl: CxlUse) -> Plan:
    hardware, estimate = found.hardware, found.estimate
    homes: list[Home] = []
    node_bytes = dict.fromkeys((tier.node for tier in hardware.nodes), 0)
    for kind in found.step.kinds:
        weights = found.weights[kind.name]
        for tier, nbytes in zip(hardware.nodes, kind_bytes(kind, weights), strict=True):
            node_bytes[tier.node] += nbytes
            if nbytes:
                where = tier.where
                share = 100 * nbytes / kind.bytes
                policy = _policy(hardware, weights)
                homes.append(
                    Home(kind=kind.name, where=where, bytes=nbytes, percent=share, policy=policy)
                )
    initiator = request.machine.initiator
    threads = len(request.machine.node(initiator).cpus)
    command = ("deepspeed", "--num_gpus=1", request.script, "--deepspeed")
    return Plan(
        kind="training",
        executor="deepspeed",
        runs=True,
        model=job.model.name,
        machine=hardware.machine,
        command=(*command, "--deepspeed_config", CONFIG),
        batch=Batch(size=found.micro, count=found.step.accumulation, prompt=0, tokens=job.tokens),
        homes=tuple(homes),
        node_bytes=node_bytes,
        gpu_bytes=found.gpu_bytes,
        tokens_per_s=job.batch * job.tokens / estimate.step_s,
        phases=_phases(estimate),
        cxl=cxl,
        prices=_prices(request, job, found),
        settings={CONFIG: _config(found)},
        threads={initiator: threads} if threads else {},
        notes=(
            *hardware.notes,
            f"ZeRO stage {found.stage}, bf16, activation checkpointing, one GPU",
            f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU "
            "memory",
            "the script gives the optimizer: DeepSpeedCPUAdam, or this package's CPUAdam",
            "no absolute step time is published for these machines, so no error is known",
            *_replayed(request, job, found),
        ),
    )


def _replayed(request: TrainingRequest, job: TrainingJob, found: _Found) -> list[str]:
    """What a replay of the step's bytes disagrees on."""
    if request.replay is None:
        return []
    replay, step, hardware = request.replay, found.step, found.hardware
    work = planned_work(job, step, hardware, found.weights)
    return disagreements(
        equation_phases(found.estimate),
        lambda: replayed_phases(replay, work, step, hardware, request.machine),
    )


def _prices(request: TrainingRequest, job: TrainingJob, found: _Found) -> tuple[PriceEstimate, ...]:
    """Tokens/s that one unit more of everything brings, each planned again."""
    made = []
    rows = job.batch * job.tokens
    rest = rows / found.estimate.step_s
    for knob in knobs(found.hardware):
        more = knob.with_value(knob.value + knob.unit_size)
        step = replace(found.step, cpu_bytes_per_s=_cpu_rate(request, more))
        if more.gpu_usable_bytes > found.hardware.gpu_usable_bytes:
            again = _search(request, job, more, step.cpu_bytes_per_s)
            seconds = found.estimate.step_s if again is None else again.estimate.step_s
        else:
            placed = place(step, more)
            seconds = found.estimate.step_s if placed is None else placed[1].step_s
        gain = max(0.0, rows / seconds - rest)
        made.append(PriceEstimate(what=knob.what, unit=knob.unit, gain_tokens_per_s=gain))
    return tuple(made)


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


def _config(found: _Found) -> str:
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
        "activation_checkpointing": {"partition_activations": False},
    }
    return json.dumps(config, indent=1)
