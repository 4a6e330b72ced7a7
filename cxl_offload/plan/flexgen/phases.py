"""Seconds of FlexGen's phases with weights and KV placed apart, term by term.

The equations of ``flexgen.model``, for weights and KV that lie differently: what lies on the tiers
in whole tensors or whole sequences is read from one tier after the other, ``sum(X_i / B_i)``, what
is striped from all at once, ``max(f_i / B_i)`` a byte. Same range of validity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cxl_offload.plan.equations.interleave import (
    bandwidth_bound,
    mean_latency_ns,
    shares_of_weights,
)
from cxl_offload.plan.flexgen.choice import Choice, Loads
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.terms import (
    CPU_ATTENTION_FLOPS_PER_CORE,
    HIDDEN_STORE_BYTES_PER_S,
    KV_DRIVE_STORE_BYTES_PER_S,
    KV_STORE_BYTES_PER_S,
    WORKSPACE_BYTES_PER_ELEMENT,
)
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY, roofline_seconds
from cxl_offload.plan.hardware import Hardware

__all__ = ["Phases", "decode_gpu_seconds", "phases_of", "prefill_flops", "prefill_gpu_seconds"]


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of the prefill of a block and of one decoded token, and the terms they are made of.

    The prefill is the largest of its terms. A decoded token is ``weights`` and ``hidden loads``
    one after the other, then the largest of the other terms.
    """

    prefill_s: float
    decode_token_s: float
    prefill_terms: Mapping[str, float]
    decode_terms: Mapping[str, float]
    total_s: float
    tokens_per_s: float


def decode_gpu_seconds(job: FlexGenJob, hardware: Hardware, gpu_batch: int) -> float:
    """GPU work of one decoded token of one GPU batch, attention left out."""
    return roofline_seconds(
        hardware.gpu,
        flops=2 * job.params * gpu_batch,
        nbytes=job.weight_bytes,
        efficiency=PREFILL_EFFICIENCY,
    )


def prefill_gpu_seconds(job: FlexGenJob, hardware: Hardware, sequences: int) -> float:
    """GPU work of the prefill of a block, never less than reading the weights once."""
    return roofline_seconds(
        hardware.gpu,
        flops=prefill_flops(job, sequences),
        nbytes=job.weight_bytes,
        efficiency=PREFILL_EFFICIENCY,
    )


def prefill_flops(job: FlexGenJob, sequences: int) -> float:
    """Arithmetic of a prefill: the weights' products and the attention scores."""
    flops = 2.0 * job.params * sequences * job.prompt
    return flops + 4.0 * sequences * job.prompt**2 * job.width * job.layers


def _link_seconds(hardware: Hardware, choice: Choice, loads: Loads) -> float:
    """All weights off the GPU over the link, once; what is on the drive is staged on a tier."""
    link = hardware.link_bytes_per_s
    rates = [tier.rates.dma_bytes_per_s for tier in hardware.tiers]
    seconds = loads.weights_drive / min(link, rates[0])
    if choice.weight_stripe is None:
        parts = zip(loads.weights_host, rates, strict=True)
        return seconds + sum(nbytes / min(link, rate) for nbytes, rate in parts)
    rate = bandwidth_bound(rates, shares_of_weights(choice.weight_stripe))
    return seconds + sum(loads.weights_host) / min(link, rate)


def _kv_read_seconds(hardware: Hardware, choice: Choice, loads: Loads, kv_bytes: float) -> float:
    """KV that is off the GPU, read by the CPU; the first tier stages what is on the drive."""
    rates = [tier.rates.read_bytes_per_s for tier in hardware.tiers]
    drive = choice.kv[0] / choice.gpu_batch
    seconds = kv_bytes * drive / rates[0]
    if choice.kv_stripe is None:
        parts = zip(loads.kv_share_host, rates, strict=True)
        return seconds + sum(kv_bytes * share / rate for share, rate in parts)
    host = sum(loads.kv_share_host)
    return seconds + kv_bytes * host / bandwidth_bound(rates, shares_of_weights(choice.kv_stripe))


def _prefill_terms(
    job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads
) -> dict[str, float]:
    weights = _link_seconds(hardware, choice, loads)
    if loads.weights_drive:
        weights += loads.weights_drive / hardware.drive_read_bytes_per_s
    kv = choice.sequences * job.prompt * job.kv_bytes_per_token
    drive = choice.kv[0] / choice.gpu_batch
    latencies = [tier.rates.latency_ns for tier in hardware.tiers]
    on_host = mean_latency_ns(latencies, loads.kv_share_host) + drive * latencies[0]
    stores = kv * on_host / hardware.local_latency_ns / KV_STORE_BYTES_PER_S
    if drive:
        stores += kv * drive / min(hardware.drive_write_bytes_per_s, KV_DRIVE_STORE_BYTES_PER_S)
    return {
        "weights over the link": weights,
        "KV stores": stores,
        "GPU work": prefill_gpu_seconds(job, hardware, choice.sequences),
    }


def _decode_terms(
    job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads
) -> dict[str, float]:
    tokens = choice.sequences * job.mean_kv_tokens
    kv = tokens * job.kv_bytes_per_token
    on_gpu, on_drive = (choice.kv[at] / choice.gpu_batch for at in (-1, 0))
    off_gpu = 1 - on_gpu
    work = choice.batches * decode_gpu_seconds(job, hardware, choice.gpu_batch)
    work += kv * on_gpu / hardware.gpu.memory_bytes_per_s
    flops = 4 * tokens * off_gpu * job.width * job.layers
    arithmetic = flops / (hardware.cores * CPU_ATTENTION_FLOPS_PER_CORE)
    elements = tokens * off_gpu * job.kv_elements_per_token
    scratch = hardware.tiers[choice.scratch].rates.read_bytes_per_s
    memory = _kv_read_seconds(hardware, choice, loads, kv)
    memory += elements * WORKSPACE_BYTES_PER_ELEMENT / scratch
    hidden = choice.sequences * job.layers * job.width * 2.0 * (not choice.activations_on_gpu)
    drive = loads.weights_drive + kv * on_drive
    return {
        "weights over the link": _link_seconds(hardware, choice, loads),
        "hidden loads": hidden / hardware.link_bytes_per_s,
        "hidden stores": hidden / HIDDEN_STORE_BYTES_PER_S,
        "drive reads": drive / hardware.drive_read_bytes_per_s if drive else 0.0,
        "GPU work + CPU attention (arithmetic)": work + arithmetic,
        "GPU work + CPU attention (memory)": work + memory,
    }


def phases_of(job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads) -> Phases:
    """What the equations predict for a candidate."""
    prefill = _prefill_terms(job, hardware, choice, loads)
    decode = _decode_terms(job, hardware, choice, loads)
    in_turn = decode["weights over the link"] + decode["hidden loads"]
    token = in_turn + max(list(decode.values())[2:])
    total = max(prefill.values()) + (job.generated - 1) * token
    return Phases(
        prefill_s=max(prefill.values()),
        decode_token_s=token,
        prefill_terms=prefill,
        decode_terms=decode,
        total_s=total,
        tokens_per_s=choice.sequences * job.generated / total,
    )
