"""Public models of ZeRO-Offload training."""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.plan.equations.adam_bytes import OPTIMIZER_BYTES_PER_PARAM
from cxl_offload.plan.gpu import assumed_training_share
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.training import zero_offload
from cxl_offload.units import GB, GIB
from cxl_offload.validation import zero_memory
from cxl_offload.validation.answers import (
    HALF_PRECISION_BYTES,
    Answer,
    PublicModel,
    machine_numbers,
)
from cxl_offload.validation.copy_path import copy_seconds, path_of_machine
from cxl_offload.validation.inputs import Inputs

BUCKET_ELEMENTS = 5e8
"""Elements a copy: DeepSpeed's default reduce_bucket_size."""


def _zero_offload_memory(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("host_gib", "fits", "largest_params"))
    if metric == "largest_params":
        capacity = inputs.number("host_capacity_gib") * GIB
        return Answer(zero_memory.largest_params(capacity))
    params = inputs.number("params")
    if metric == "fits":
        return Answer(zero_memory.fits(params, inputs.number("host_capacity_gib")))
    return Answer(zero_memory.host_state_bytes(params) / GIB)


def _step_inputs(inputs: Inputs) -> zero_offload.StepInputs:
    params = inputs.number("params")
    link = inputs.number("link_gb_s", above=True) * GB
    traffic = params * inputs.number("optimizer_bytes_per_param")
    return zero_offload.StepInputs(
        forward_s=inputs.number("forward_s"),
        backward_s=inputs.number("backward_s"),
        gradient_transfer_s=params * inputs.number("gradient_bytes") / link,
        parameter_transfer_s=params * inputs.number("parameter_bytes") / link,
        optimizer_s=traffic / (inputs.number("optimizer_gb_s", above=True) * GB),
    )


def _zero_offload_step(inputs: Inputs) -> Answer:
    metrics = ("exposed_transfer_s", "step_s", "optimizer_share", "step_slowdown")
    metric = inputs.choice("metric", metrics)
    if metric == "step_slowdown":
        with_transfer = "transfer_share" in inputs or "transfer_slowdown" in inputs
        return Answer(
            zero_memory.step_slowdown(
                optimizer_share=inputs.fraction("optimizer_share"),
                optimizer_slowdown=inputs.signed("optimizer_slowdown"),
                transfer_share=inputs.fraction("transfer_share") if with_transfer else 0.0,
                transfer_slowdown=inputs.signed("transfer_slowdown") if with_transfer else 0.0,
            )
        )
    step = zero_offload.step_times(_step_inputs(inputs))
    if metric == "step_s":
        return Answer(step.step_s)
    return Answer(step.optimizer_share if metric == "optimizer_share" else step.exposed_transfer_s)


@dataclass(frozen=True, slots=True)
class OffloadedTraining:
    """What a step does, wherever its state lies."""

    params: float
    tokens: float
    gpu_flops_per_s: float
    optimizer_bytes_per_s: float


def interleaved_step(
    training: OffloadedTraining, numbers: MachineRates, tiers: list[str]
) -> tuple[zero_offload.StepInputs, float]:
    """The step with state and staging spread evenly over ``tiers``, and its transfer time.

    Raises
    ------
    ValueError
        No tier, or one stands twice.
    """
    if not tiers or len(set(tiers)) != len(tiers):
        raise ValueError(f"tiers {tiers}: need at least one, each once")
    shares = [1.0 / len(tiers)] * len(tiers)
    local = numbers.latencies_ns(["ldram", *tiers])
    optimizer = zero_offload.optimizer_seconds(
        training.params * OPTIMIZER_BYTES_PER_PARAM,
        cpu_bytes_per_s=training.optimizer_bytes_per_s,
        cores=numbers.cores(),
        bandwidth_bytes_per_s=[numbers.read_bytes_per_s(tier) for tier in tiers],
        latency_ns=local[1:],
        local_latency_ns=local[0],
        shares=shares,
    )
    path, by_tier = path_of_machine(numbers, tiers), dict(zip(tiers, shares, strict=True))
    bucket = min(training.params, BUCKET_ELEMENTS) * HALF_PRECISION_BYTES
    buckets = training.params * HALF_PRECISION_BYTES / bucket
    one_way = buckets * copy_seconds(path, by_tier, bucket)
    gpu = numbers.gpu()
    share = assumed_training_share(f"{gpu.name} {gpu.model}")
    reached = training.gpu_flops_per_s * share
    forward, backward = (
        flops / reached for flops in zero_offload.training_flops(training.params, training.tokens)
    )
    step = zero_offload.StepInputs(
        forward_s=forward,
        backward_s=backward,
        gradient_transfer_s=one_way,
        parameter_transfer_s=one_way,
        optimizer_s=optimizer,
    )
    return step, 2 * one_way


def _zero_offload_ratio(inputs: Inputs) -> Answer:
    metrics = ("optimizer_time_ratio", "transfer_time_ratio", "step_time_ratio")
    metric = inputs.choice("metric", metrics)
    inputs.choice("placement", ("interleave",))
    numbers = machine_numbers(inputs)
    training = OffloadedTraining(
        params=inputs.number("params", above=True),
        tokens=inputs.number("batch", above=True) * inputs.number("seq_len", above=True),
        gpu_flops_per_s=inputs.number("gpu_tflops", above=True) * 1e12,
        optimizer_bytes_per_s=inputs.number("optimizer_gb_s", above=True) * GB,
    )
    (step_a, copies_a), (step_b, copies_b) = (
        interleaved_step(training, numbers, inputs.texts(key)) for key in ("a", "b")
    )
    notes = tuple(numbers.notes)
    if metric == "optimizer_time_ratio":
        return Answer(step_a.optimizer_s / step_b.optimizer_s, notes)
    if metric == "transfer_time_ratio":
        return Answer(copies_a / copies_b, notes)
    whole = [zero_offload.step_times(step).step_s for step in (step_a, step_b)]
    return Answer(whole[0] / whole[1], notes)


MODELS = (
    PublicModel(
        "zero_offload_memory", ("params", "metric", "host_capacity_gib"), _zero_offload_memory
    ),
    PublicModel(
        "zero_offload_step",
        (
            "forward_s", "backward_s", "params", "gradient_bytes", "parameter_bytes", "link_gb_s",
            "optimizer_bytes_per_param", "optimizer_gb_s", "metric", "optimizer_share",
            "optimizer_slowdown", "transfer_share", "transfer_slowdown",
        ),
        _zero_offload_step,
    ),
    PublicModel(
        "zero_offload_ratio",
        (
            "params", "batch", "seq_len", "gpu_tflops", "optimizer_gb_s", "placement", "a", "b",
            "metric",
        ),
        _zero_offload_ratio,
    ),
)  # fmt: skip
