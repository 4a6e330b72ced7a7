"""The batch FlexGen's policy search chooses when only the share of KV on the GPU is free.

For every GPU batch size of FlexGen's list and every number of GPU batches that fits, the planner's
equations give the throughput; the highest wins. What fits follows FlexGen's peak-memory
constraints (experimental/cost_model.py), written for any element size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cxl_offload.plan.flexgen.planner import GPU_BATCHES
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.usable import GPU_USABLE, HOST_USABLE
from cxl_offload.validation.flexgen_shape import ShapeOnTiers, throughput
from cxl_offload.validation.footprint import (
    ElementBytes,
    Lengths,
    LlmShape,
    activation_bytes_per_sequence,
    kv_bytes_per_sequence,
    kv_elements_per_token,
    weight_bytes_total,
)
from cxl_offload.validation.pages import spread_evenly

RELAY_BYTES = 8 * 2**30
"""Pinned relay buffers that FlexGen always takes: 4 copy threads, 2 GiB each (pytorch_backend.py,
copy_worker_func)."""

COARSE_STEPS = 64


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A model and its lengths on host tiers, a GPU and perhaps a drive; capacities in bytes.

    ``host_capacity_bytes`` has one entry a tier of the machine, in its order.
    """

    llm: LlmShape
    sizes: ElementBytes
    lengths: Lengths
    host_capacity_bytes: tuple[float, ...]
    gpu_memory_bytes: float
    drive_capacity_bytes: float = 0.0
    weights_gpu_fraction: float = 0.0
    activations_gpu_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The chosen placement and its generated tokens a second."""

    placement: ShapeOnTiers
    tokens_per_s: float


def _layer_bytes(request: SearchRequest) -> float:
    return weight_bytes_total(request.llm, request.sizes) / request.llm.layers


def _gpu_prefill_work_bytes(request: SearchRequest, gpu_batch: int) -> float:
    """Intermediates of one layer in prefill: 13 vectors a token, and the attention scores.

    FlexGen cost model, inter_gpu_working_p, with a feed-forward width of four times the model's.
    """
    llm, tokens = request.llm, request.lengths.prompt
    vectors = (13 + (1 - request.activations_gpu_fraction)) * tokens * llm.width
    scores = llm.heads * tokens**2
    return gpu_batch * (vectors + scores) * request.sizes.activations


def gpu_kv_bytes(request: SearchRequest, *, batch: int, gpu_batch: int) -> float:
    """KV bytes the GPU can keep for ``batch`` sequences; negative when not even the work fits.

    GPU memory at FlexGen's share, less resident weights and activations, two layers of streamed
    weights and the intermediates of a GPU batch. Source: FlexGen cost model, gpu_home, gpu_w.
    """
    request_weights = weight_bytes_total(request.llm, request.sizes)
    room = GPU_USABLE * request.gpu_memory_bytes
    room -= request_weights * request.weights_gpu_fraction
    room -= 2 * _layer_bytes(request) * (1 - request.weights_gpu_fraction)
    hidden = request.lengths.prompt * request.llm.width * request.sizes.activations
    room -= batch * hidden * request.activations_gpu_fraction
    return room - _gpu_prefill_work_bytes(request, gpu_batch)


def host_need_bytes(
    request: SearchRequest, *, batch: int, gpu_batch: int, kv_gpu_fraction: float
) -> float:
    """Host (and drive) bytes at the peak: weights, KV, activations and the work beside them.

    The work is the pinned relay buffers, one layer of staged weights, and the fp32 workspace of
    CPU attention, of which overlapping loads need two. Source: FlexGen cost model, cpu_home and
    cpu_w; pytorch_backend.py, init_cpu_workspace.
    """
    llm, sizes, lengths = request.llm, request.sizes, request.lengths
    weights = weight_bytes_total(llm, sizes) * (1 - request.weights_gpu_fraction)
    kv = batch * kv_bytes_per_sequence(llm, sizes, lengths) * (1 - kv_gpu_fraction)
    activations = batch * activation_bytes_per_sequence(llm, sizes, lengths)
    activations *= 1 - request.activations_gpu_fraction
    workspace = 2 * 4 * gpu_batch * lengths.total * kv_elements_per_token(llm) / llm.layers
    staged = _layer_bytes(request) * (1 - request.weights_gpu_fraction)
    return weights + kv + activations + workspace + staged + RELAY_BYTES


def _place(request: SearchRequest, *, batch: int, gpu_batch: int) -> ShapeOnTiers | None:
    """The placement of a batch with as much KV on the GPU as fits, or None when it does not."""
    room = gpu_kv_bytes(request, batch=batch, gpu_batch=gpu_batch)
    if room < 0:
        return None
    kv = batch * kv_bytes_per_sequence(request.llm, request.sizes, request.lengths)
    on_gpu = min(1.0, room / kv) if kv > 0 else 1.0
    need = host_need_bytes(request, batch=batch, gpu_batch=gpu_batch, kv_gpu_fraction=on_gpu)
    usable = [HOST_USABLE * capacity for capacity in request.host_capacity_bytes]
    on_drive = max(0.0, need - sum(usable))
    if on_drive > HOST_USABLE * request.drive_capacity_bytes:
        return None
    placed = spread_evenly(need - on_drive, usable)
    return ShapeOnTiers(
        batch=batch,
        gpu_batch=gpu_batch,
        host_shares=tuple(amount / need for amount in placed),
        drive_share=on_drive / need,
        weights_gpu_fraction=request.weights_gpu_fraction,
        kv_gpu_fraction=on_gpu,
        activations_gpu_fraction=request.activations_gpu_fraction,
    )


def _largest_rounds(request: SearchRequest, gpu_batch: int) -> int:
    """Most GPU batches that fit, by doubling and bisection as in FlexGen."""
    high = 1
    while _place(request, batch=gpu_batch * high, gpu_batch=gpu_batch) is not None:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        fits = _place(request, batch=gpu_batch * middle, gpu_batch=gpu_batch)
        low, high = (middle, high) if fits is not None else (low, middle)
    return low


def _candidates(most: int) -> Sequence[int]:
    """Numbers of GPU batches to try: all of them, or ``COARSE_STEPS`` spread evenly and the most.

    Throughput rises with the batch until the drive is used and then has one maximum at most, so
    a coarse walk loses less than one step, 1.6 % of the batch.
    """
    if most <= COARSE_STEPS:
        return range(1, most + 1)
    return sorted(
        {max(1, round(most * step / COARSE_STEPS)) for step in range(1, COARSE_STEPS + 1)}
    )


def _placements(request: SearchRequest) -> Iterator[ShapeOnTiers]:
    for gpu_batch in GPU_BATCHES:
        for rounds in _candidates(_largest_rounds(request, gpu_batch)):
            place = _place(request, batch=gpu_batch * rounds, gpu_batch=gpu_batch)
            if place is not None:
                yield place


def search(request: SearchRequest, machine: Hardware) -> SearchResult | None:
    """The placement with the highest overall throughput, or None when no batch fits.

    Source: FlexGen's policy search (Sheng et al., ICML 2023, 4.3), its linear program replaced by
    the closed form that remains when weights and activations are fixed: more KV on the GPU is
    never slower.

    Raises
    ------
    ValueError
        A sequence takes no bytes, or bytes come to lie on a drive of unknown rate.
    """
    per_sequence = kv_bytes_per_sequence(request.llm, request.sizes, request.lengths)
    per_sequence += activation_bytes_per_sequence(request.llm, request.sizes, request.lengths)
    if per_sequence <= 0:
        raise ValueError("search: a sequence of no bytes fits any number of times")
    best: SearchResult | None = None
    for place in _placements(request):
        rate = throughput(machine, request.llm, request.sizes, request.lengths, place).overall
        if best is None or rate > best.tokens_per_s:
            best = SearchResult(place, rate)
    return best
