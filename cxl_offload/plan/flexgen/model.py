"""FlexGen inference over several host tiers: time of prefill and of a decoded token.

FlexGen's cost model (Sheng et al., FlexGen, ICML 2023, section 4.3; the package's
experimental/cost_model.py) knows one kind of host memory. Here every host stream is charged to
the tiers its pages lie on, and what its model omits is added: bandwidth of the tiers under CPU
attention, its fp32 workspace, and the latency of the tier that KV is stored to.

One decoded token, all layers::

    T_gen = weights over the link + max(hidden to host, drive reads, GPU work + CPU attention)

and the prefill of a batch::

    T_pre = max(weights over the link + drive reads, KV to host + drive writes, GPU work)

Valid for page-interleaved weights and KV, attention of host-resident KV on the CPU, weights
streamed for every layer and token, and FlexGen's overlap of one layer. Kernel launches, the
embedding and sampling are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.plan.equations.footprint import (
    ElementBytes,
    Lengths,
    LlmShape,
    kv_bytes_per_token,
    kv_elements_per_token,
    weight_bytes_total,
)
from cxl_offload.plan.flexgen.terms import (
    HIDDEN_STORE_BYTES_PER_S,
    KV_DRIVE_STORE_BYTES_PER_S,
    FlexGenMachine,
    Placement,
    cpu_attention_seconds,
    drive_seconds,
    kv_store_seconds,
    of_host_part,
    staged_shares,
    weights_link_seconds,
)
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY, roofline_seconds

__all__ = ["Throughput", "decode_seconds_per_token", "prefill_seconds", "throughput"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Prefill in sequences a second, decode and overall in generated tokens a second."""

    prefill: float
    decode: float
    overall: float


def prefill_seconds(
    machine: FlexGenMachine,
    llm: LlmShape,
    sizes: ElementBytes,
    lengths: Lengths,
    place: Placement,
) -> float:
    """Seconds to prefill the whole batch: the slowest of weights, KV stores and GPU work."""
    tokens = place.batch * lengths.prompt
    weights = weight_bytes_total(llm, sizes) * (1 - place.weights_gpu_fraction)
    load = weights_link_seconds(machine, llm, sizes, place)
    load += drive_seconds(weights * place.drive_share, machine.drive_read_bytes_per_s)
    kv = tokens * kv_bytes_per_token(llm, sizes) * (1 - place.kv_gpu_fraction)
    store = kv_store_seconds(machine, staged_shares(place), kv)
    written = machine.drive_write_bytes_per_s or machine.drive_read_bytes_per_s
    if written is not None:
        written = min(written, KV_DRIVE_STORE_BYTES_PER_S)
    store += drive_seconds(kv * place.drive_share, written)
    flops = 2 * llm.params * tokens
    flops += 4 * place.batch * lengths.prompt**2 * llm.width * llm.layers
    compute = roofline_seconds(
        machine.gpu,
        flops=flops,
        nbytes=weight_bytes_total(llm, sizes),
        efficiency=PREFILL_EFFICIENCY,
    )
    return max(load, store, compute)


def _gpu_decode_seconds(
    machine: FlexGenMachine,
    llm: LlmShape,
    sizes: ElementBytes,
    place: Placement,
    kv_bytes: float,
) -> float:
    """GPU part of a decoded token: each GPU batch reads all weights, and KV on the GPU is read."""
    gpu_batch = place.gpu_batch or place.batch
    rounds = -(-place.batch // gpu_batch)
    one_round = roofline_seconds(
        machine.gpu,
        flops=2 * llm.params * gpu_batch,
        nbytes=weight_bytes_total(llm, sizes),
        efficiency=PREFILL_EFFICIENCY,
    )
    on_gpu = kv_bytes * place.kv_gpu_fraction
    return rounds * one_round + on_gpu / machine.gpu.memory_bytes_per_s


def decode_seconds_per_token(
    machine: FlexGenMachine,
    llm: LlmShape,
    sizes: ElementBytes,
    place: Placement,
    *,
    kv_tokens: float,
) -> float:
    """Seconds of one decode step of the whole batch with ``kv_tokens`` tokens of KV a sequence."""
    load = weights_link_seconds(machine, llm, sizes, place)
    kv = place.batch * kv_tokens * kv_bytes_per_token(llm, sizes)
    on_host_tokens = place.batch * kv_tokens * (1 - place.kv_gpu_fraction)
    kv_off_gpu = on_host_tokens * kv_bytes_per_token(llm, sizes)
    flops = 4 * on_host_tokens * llm.width * llm.layers
    # KV of the drive is staged on the host before attention reads it there.
    attention = cpu_attention_seconds(
        machine,
        of_host_part(place.host_shares),
        flops=flops,
        kv_bytes=kv_off_gpu,
        kv_elements=on_host_tokens * kv_elements_per_token(llm),
    )
    compute = _gpu_decode_seconds(machine, llm, sizes, place, kv) + attention
    hidden = place.batch * llm.layers * llm.width * sizes.activations
    hidden *= 1 - place.activations_gpu_fraction
    weights = weight_bytes_total(llm, sizes) * (1 - place.weights_gpu_fraction)
    drive = drive_seconds(
        (weights + kv_off_gpu) * place.drive_share, machine.drive_read_bytes_per_s
    )
    load += hidden / machine.link_bytes_per_s
    return load + max(hidden / HIDDEN_STORE_BYTES_PER_S, drive, compute)


def throughput(
    machine: FlexGenMachine,
    llm: LlmShape,
    sizes: ElementBytes,
    lengths: Lengths,
    place: Placement,
) -> Throughput:
    """Throughput of a batch: one prefill, then ``generated - 1`` decode steps.

    KV grows linearly, so a decode step is charged the mean length, prompt + generated / 2, as in
    FlexGen's model.

    Raises
    ------
    ValueError
        An empty batch, or sequences too short for the phase asked for.
    """
    if place.batch < 1 or lengths.prompt < 1 or lengths.generated < 2:
        raise ValueError(
            f"batch {place.batch}, prompt {lengths.prompt}, generated {lengths.generated}: need a "
            "batch and a prompt >= 1 and at least 2 generated tokens"
        )
    prefill = prefill_seconds(machine, llm, sizes, lengths, place)
    steps = lengths.generated - 1
    mean_tokens = lengths.prompt + lengths.generated / 2
    decode = steps * decode_seconds_per_token(machine, llm, sizes, place, kv_tokens=mean_tokens)
    return Throughput(
        prefill=place.batch / prefill,
        decode=place.batch * steps / decode,
        overall=place.batch * lengths.generated / (prefill + decode),
    )
