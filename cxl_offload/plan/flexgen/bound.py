"""A lower bound of the seconds of every batch at once, so that few of them need a program.

Every term is made as small as it can be by itself: KV goes to the fastest tier for the term at
hand, weights too, a tier's room is offered to both, and only the sum of all host tiers is charged
with everything. What is whole stays whole: cuts of weights at the GPU's and the drive's end, and
sequences. So the bound is never above the optimum, and close to it; a test checks the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxl_offload.arrays import Floats
from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import decode_gpu_seconds, prefill_flops
from cxl_offload.plan.flexgen.choice import Stripe
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.layout import WeightCut
from cxl_offload.plan.flexgen.mode import STRIPE_TOTAL, Mode, Ratios
from cxl_offload.plan.hardware import Hardware

_FLOOR = 1e-9
"""A quotient this close below a whole number is that number."""

_ROUGH = 1 - 1e-6
"""Of a rough bound: more than what ``_FLOOR`` lets fit that fits nowhere, and costs nothing."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Room for bytes and what a byte there costs."""

    room: Floats | float
    seconds_per_byte: float


def _least_cost(nbytes: Floats, buckets: list[_Bucket]) -> Floats:
    """Cheapest way to put bytes into buckets; what fits nowhere costs nothing (a lower bound)."""
    left, cost = nbytes, np.zeros_like(nbytes)
    for bucket in sorted(buckets, key=lambda each: each.seconds_per_byte):
        here = np.minimum(left, bucket.room)
        cost = cost + here * bucket.seconds_per_byte
        left = left - here
    return cost


def _whole(quotient: Floats) -> Floats:
    return np.floor(np.maximum(quotient, -1.0) + _FLOOR)


def most_sequences(job: FlexGenJob, hardware: Hardware) -> int:
    """No block has more sequences than all memory has room for beside the weights."""
    room = sum(tier.usable_bytes for tier in hardware.nodes)
    room += hardware.gpu_usable_bytes + hardware.drive_usable_bytes - job.weight_bytes
    return max(0, int(room // job.kv_sequence_bytes))


def least_seconds(
    job: FlexGenJob,
    hardware: Hardware,
    mode: Mode,
    levels: tuple[WeightCut, ...],
    batches: Floats,
) -> Floats:
    """Seconds of a block that no choice of this mode undercuts; infinite where none fits.

    Parameters
    ----------
    batches
        float64 ``(B,)``: numbers of GPU batches.

    Returns
    -------
    numpy.ndarray
        float64 ``(B,)``.
    """
    return _least_of(job, hardware, mode, _cuts(hardware, mode, levels), batches)


def rough_seconds(
    job: FlexGenJob,
    hardware: Hardware,
    mode: Mode,
    levels: tuple[WeightCut, ...],
    batches: Floats,
) -> Floats:
    """The same, and never above it, without a look at every pair of cuts: whatever the drive is
    given, its time and the link's are the least, and the host's room is the most, of any part.
    """
    cuts = _cuts(hardware, mode, levels).by_rest()
    return _ROUGH * _least_of(job, hardware, mode, cuts, batches)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Cuts of the weights to look at, float64 ``(C, 1)`` each.

    Bytes off the GPU; of them on the drive at least and at most; seconds of the drive, of the link,
    and of both in turn, at least.
    """

    off_gpu: Floats
    drive_least: Floats
    drive_most: Floats
    drive_s: Floats
    load_s: Floats
    both_s: Floats

    def by_rest(self) -> _Cuts:
        """One entry for all that leave the same off the GPU."""
        rest, at = np.unique(self.off_gpu[:, 0], return_inverse=True)

        def least(values: Floats) -> Floats:
            found = np.full(len(rest), np.inf)
            np.minimum.at(found, at, values[:, 0])
            return found[:, None]

        return _Cuts(
            off_gpu=rest[:, None],
            drive_least=least(self.drive_least),
            drive_most=-least(-self.drive_most),
            drive_s=least(self.drive_s),
            load_s=least(self.load_s),
            both_s=least(self.both_s),
        )


def _cuts(hardware: Hardware, mode: Mode, levels: tuple[WeightCut, ...]) -> _Cuts:
    """Every pair of a cut at the drive's end and one at the GPU's."""
    below = np.array([level.bytes_below for level in levels], dtype=np.float64)
    first, last = np.triu_indices(len(levels))
    if not hardware.drive_usable_bytes:
        first, last = first[first == 0], last[first == 0]
    on_drive, off_gpu = below[first][:, None], below[last][:, None]
    link = hardware.link_bytes_per_s
    dma = [min(link, tier.copy_bytes_per_s) for tier in hardware.nodes]
    load = _least_read(off_gpu - on_drive, hardware, mode.weight_stripe, dma)
    load = np.maximum(load, (off_gpu - on_drive) / link) + on_drive / dma[0]
    drive_s = on_drive * 0.0
    if hardware.drive_usable_bytes:
        drive_s = on_drive / hardware.drive_read_bytes_per_s
    return _Cuts(off_gpu, on_drive, on_drive, drive_s, load, load + drive_s)


def _least_of(
    job: FlexGenJob, hardware: Hardware, mode: Mode, cuts: _Cuts, batches: Floats
) -> Floats:
    """The least over all cuts, with hidden states on the host and on the GPU."""
    best = np.full(len(batches), np.inf)
    for act in (0.0, 1.0):
        seconds = _bound(job, hardware, mode, cuts, batches[None, :], act)
        best = np.minimum(best, seconds.min(axis=0))
    return best


def _least_read(
    nbytes: Floats,
    hardware: Hardware,
    stripe: Stripe | Ratios | None,
    rates: list[float],
    beside: Sequence[_Bucket] = (),
) -> Floats:
    """Least seconds to read bytes off the GPU, at the nodes' rates or from rooms beside them."""
    rooms = [tier.usable_bytes for tier in hardware.nodes]
    pairs = list(zip(rooms, rates, strict=True))
    if stripe is None:
        return _least_cost(nbytes, [*(_Bucket(room, 1 / rate) for room, rate in pairs), *beside])
    shares = _least_shares(stripe)
    each = max(share / rate for share, rate in zip(shares, rates, strict=True))
    seconds = _least_cost(nbytes, [_Bucket(_stripe_room(hardware, stripe), each), *beside])
    if not isinstance(stripe, Ratios):
        return seconds
    used = [pair for pair, (_, most) in zip(pairs, stripe.limits, strict=True) if most]
    return np.maximum(seconds, _least_cost(nbytes, [*_filled_together(used), *beside]))


def _filled_together(nodes: list[tuple[float, float]]) -> list[_Bucket]:
    """Rooms and rates read at once in the best ratio: a node that is full leaves it to the rest."""
    buckets, before = [], 0.0
    for room, rate in sorted(nodes, key=lambda node: node[0] / node[1]):
        together = sum(other for size, other in nodes if size / other >= room / rate)
        buckets.append(_Bucket((room / rate - before) * together, 1 / together))
        before = room / rate
    return buckets


def _least_shares(stripe: Stripe | Ratios) -> list[float]:
    """Of every node; those of a stripe are what it has."""
    if isinstance(stripe, Ratios):
        return [low / STRIPE_TOTAL for low, _ in stripe.limits]
    return [weight / sum(stripe) for weight in stripe]


def _stripe_room(hardware: Hardware, stripe: Stripe | Ratios) -> float:
    nodes = zip(hardware.nodes, _least_shares(stripe), strict=True)
    room = min((tier.usable_bytes / share for tier, share in nodes if share), default=np.inf)
    if isinstance(stripe, Ratios):
        limits = zip(hardware.nodes, stripe.limits, strict=True)
        room = min(room, sum(tier.usable_bytes for tier, (_, most) in limits if most))
    return room


@dataclass(frozen=True, slots=True)
class _Split:
    """Sequences of a GPU batch: at most on the GPU, then at least on host and drive together."""

    gpu: Floats
    off_gpu: Floats
    drive_least: Floats
    drive_most: Floats
    feasible: NDArray[np.bool_]


def _split(
    job: FlexGenJob,
    hardware: Hardware,
    mode: Mode,
    cuts: _Cuts,
    n: Floats,
    act: float,
) -> _Split:
    size, hidden, off_gpu = mode.gpu_batch, job.hidden_bytes(mode.gpu_batch), cuts.off_gpu
    sequence = n * job.kv_sequence_bytes
    loaded = np.where(off_gpu > 0, job.gpu_loaded_bytes, 0)
    held = 2 + (n - 2) * act
    room = hardware.gpu_usable_bytes - (job.weight_bytes - off_gpu) - loaded
    room = room - held * hidden - job.gpu_work_bytes(size)
    most = _whole(room / sequence)
    feasible = most >= (size if mode.kv_on_gpu else 0)
    feasible = feasible & (cuts.drive_least <= hardware.drive_usable_bytes)
    gpu = np.minimum(most, size if mode.kv_on_gpu else size - 1)
    scratch = (1 - act) * (n + 1) * hidden
    if not mode.kv_on_gpu:
        scratch = scratch + (n + 1) * job.mask_bytes(size)
        several, one = (job.workspace_bytes(batches, size) for batches in (2, 1))
        scratch = scratch + np.where(n > 1, several, one)
    total = sum(tier.usable_bytes for tier in hardware.nodes)
    host_room = total - (off_gpu - cuts.drive_most) - scratch
    feasible &= host_room >= 0
    host_most = _whole(host_room / sequence)
    if mode.kv_stripe is not None:
        host_most = np.minimum(
            host_most, _stripe_room(hardware, mode.kv_stripe) / sequence + _FLOOR
        )
    if mode.weight_stripe is not None:
        feasible &= off_gpu - cuts.drive_most <= _stripe_room(hardware, mode.weight_stripe)
    off = size - gpu
    drive_most = _whole((hardware.drive_usable_bytes - cuts.drive_least) / sequence)
    if not job.engine.kv_drive_store_bytes_per_s:
        drive_most = np.minimum(drive_most, 0)
    drive_least = np.ceil(np.maximum(0.0, off - host_most) - _FLOOR)
    feasible &= drive_least <= drive_most
    return _Split(gpu, off, drive_least, np.maximum(drive_most, 0), feasible)


def _bound(
    job: FlexGenJob,
    hardware: Hardware,
    mode: Mode,
    cuts: _Cuts,
    n: Floats,
    act: float,
) -> Floats:
    split = _split(job, hardware, mode, cuts, n, act)
    link = hardware.link_bytes_per_s
    prefill = np.maximum(cuts.both_s, _stores(job, hardware, mode, split, n))
    flops = prefill_flops(job, mode.gpu_batch) * n
    work = flops / hardware.gpu.products_flops_per_s
    prefill = np.maximum(prefill, work)
    prefill = np.maximum(prefill, job.weight_bytes / hardware.gpu.memory_bytes_per_s)
    hidden = n * mode.gpu_batch * job.layers * job.width * 2.0 * (1 - act)
    slowest = np.maximum(
        hidden / min(job.engine.hidden_store_bytes_per_s, link),
        _attention(job, hardware, mode, split, n),
    )
    if hardware.drive_usable_bytes:
        kv = n * split.drive_least * job.mean_kv_tokens * job.kv_bytes_per_token
        slowest = np.maximum(slowest, cuts.drive_s + kv / hardware.drive_read_bytes_per_s)
    load = cuts.load_s + hidden / link
    token = np.maximum(load, slowest) if job.engine.overlaps else load + slowest
    total = prefill + (job.generated - 1) * token
    return np.where(split.feasible, total, np.inf)


def _stores(job: FlexGenJob, hardware: Hardware, mode: Mode, split: _Split, n: Floats) -> Floats:
    costs = kv_store_costs(job.engine, hardware)
    stripe = mode.kv_stripe
    scale = job.positions / job.prompt  # rooms are of full caches, stores of prompts
    rooms = [tier.usable_bytes for tier in hardware.nodes]
    buckets = [_Bucket(room, cost / scale) for room, cost in zip(rooms, costs, strict=True)]
    if stripe is not None and not isinstance(stripe, Ratios):
        mean = sum(w * cost for w, cost in zip(stripe, costs, strict=True)) / sum(stripe)
        buckets = [_Bucket(_stripe_room(hardware, stripe), mean / scale)]
    written = min(hardware.drive_write_bytes_per_s, job.engine.kv_drive_store_bytes_per_s)
    if hardware.drive_usable_bytes and written:
        cost = (costs[0] + 1 / written) / scale
        buckets.append(_Bucket(split.drive_most * n * job.kv_sequence_bytes, cost))
    return _least_cost(split.off_gpu * n * float(job.kv_sequence_bytes), buckets)


def _attention(job: FlexGenJob, hardware: Hardware, mode: Mode, split: _Split, n: Floats) -> Floats:
    """GPU work and CPU attention: arithmetic or memory, whichever is longer."""
    kv = job.mean_kv_tokens * job.kv_bytes_per_token
    rates = [tier.read_bytes_per_s for tier in hardware.nodes]
    gpu_rate = hardware.gpu.memory_bytes_per_s
    work = n * decode_gpu_seconds(job, hardware, mode.gpu_batch)
    flops = 4 * job.mean_kv_tokens * job.width * job.layers
    each = flops / (hardware.cores * job.engine.attention_flops_per_core)
    # KV moved off the GPU costs at least `each`, so it is dearer there only if the GPU is slower
    if kv / gpu_rate <= each:
        work = work + n * split.gpu * kv / gpu_rate
    elements = (
        job.mean_kv_tokens * job.kv_elements_per_token * job.engine.workspace_bytes_per_element
    )
    least = n * split.off_gpu * elements / max(rates)
    scale = job.positions / job.mean_kv_tokens * job.engine.attention_share
    reached = [rate * scale for rate in rates]
    beside = []
    if hardware.drive_usable_bytes:
        room = split.drive_most * n * job.kv_sequence_bytes
        beside.append(_Bucket(room, 1 / reached[0]))
    nbytes = split.off_gpu * n * float(job.kv_sequence_bytes)
    memory = _least_read(nbytes, hardware, mode.kv_stripe, reached, beside)
    slower: Floats = np.maximum(n * split.off_gpu * each, memory + least)
    return work + slower
