"""What a planned training step would move, replayed apart from the equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cxl_offload.plan.equations.activation_bytes import ACTIVATIONS
from cxl_offload.plan.gpu import assumed_training_share
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.planned_machine import at_decoding_rates
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.training.job import TrainingJob
from cxl_offload.plan.training.placement import StepEstimate, TrainingStep, Weights
from cxl_offload.sim import CpuStream, Engines, ModelShape, TensorHome, TrainingWork, training_trace
from cxl_offload.topology import Gpu, Machine


def model_shape(model: ModelConfig) -> ModelShape:
    """A model as the simulator takes it."""
    return ModelShape(
        layers=model.layers,
        width=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_width=model.head_dim,
        inner=model.ffn,
        vocab=model.vocab,
        gated=model.gated,
        experts=model.experts,
        active_experts=model.experts_per_token,
    )


def _home(hardware: Hardware, weights: Sequence[int]) -> TensorHome:
    total = sum(weights)
    nodes = [tier.node for tier in hardware.nodes]
    return TensorHome(nodes={n: w / total for n, w in zip(nodes, weights, strict=True) if w})


def planned_work(
    job: TrainingJob, step: TrainingStep, hardware: Hardware, weights: Weights
) -> TrainingWork:
    """One pass of the planned step; sums of gradients are at the largest part of their buffer."""
    staging = weights[step.sum_kind]
    return TrainingWork(
        shape=model_shape(job.model),
        micro_batch=job.batch // step.accumulation,
        tokens=job.tokens,
        attended=job.attended,
        recomputed_scores=job.flash_attention,
        checkpoints=_home(hardware, weights[ACTIVATIONS]) if ACTIVATIONS in weights else None,
        parameters=_home(hardware, weights["params"]) if step.stage == 3 else TensorHome(gpu=1.0),
        gradients=_home(hardware, weights["fp32_grad"]),
        master=_home(hardware, weights["fp32_master"]),
        momentum=_home(hardware, weights["exp_avg"]),
        variance=_home(hardware, weights["exp_avg_sq"]),
        stage=hardware.nodes[staging.index(max(staging))].node,
        zero_stage=step.stage,
        early_return=False,
        cast_apart=True,
    )


def replayed_phases(
    replay: Replay, work: TrainingWork, step: TrainingStep, hardware: Hardware, machine: Machine
) -> Mapping[str, float]:
    """Seconds of forward, backward and optimizer.

    Steps of a trace are barriers, so all passes between the first and the last take the same: three
    are replayed, and the one in the middle counts for the rest. The GPU gets the share of its peak
    that training reaches, and of its memory's rate that plans count on. The CPU works through the
    states at the planned rate on local memory, whatever bounds it there: it is no number of cache
    lines in flight, with which it would be slower on all memory by as much as that is farther away.

    Raises
    ------
    ConfigError
        The machine lacks a number that the replay needs.
    """
    gpus = tuple(_at_training_rate(gpu) for gpu in at_decoding_rates(machine).gpus)
    there = replace(machine, gpus=gpus)
    stream = CpuStream(
        bytes_per_s=step.cpu_bytes_per_s,
        latency_ns=hardware.local_latency_ns,
        cores=hardware.cores,
    )

    def of(passes: int) -> Mapping[str, float]:
        trace = training_trace(replace(work, accumulation=passes))
        return replay(trace, there, Engines(cpu_stream=stream))

    replayed = of(min(3, step.accumulation))
    if step.accumulation <= 3:
        return replayed
    fewer, more = of(2), step.accumulation - 3
    return {phase: each + more * (each - fewer[phase]) for phase, each in replayed.items()}


def _at_training_rate(gpu: Gpu) -> Gpu:
    peak = gpu.peak_flops_per_s
    share = assumed_training_share(f"{gpu.name} {gpu.model}")
    return gpu if peak is None else replace(gpu, peak_flops_per_s=peak * share)


def equation_phases(estimate: StepEstimate) -> dict[str, float]:
    """The equations' seconds under the names of the replay's phases."""
    return {
        "forward": estimate.forward_s + estimate.fetch_exposed_s,
        "backward": estimate.backward_s + estimate.gradients_exposed_s,
        "optimizer": estimate.optimizer_s + estimate.parameters_exposed_s,
    }
