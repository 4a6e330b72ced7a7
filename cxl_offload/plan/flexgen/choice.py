"""One way to run FlexGen: every home of every kind of tensor, in FlexGen's own units.

Homes are ordered as FlexGen takes them: the drive, the host's segments, the GPU. A segment of the
host is one tier (whole tensors, whole sequences), or one stripe over several tiers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from cxl_offload.core import BASE_PAGE_BYTES, HUGE_PAGE_BYTES
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.phases import Phases, phases_of_block
from cxl_offload.plan.decoding.sizes import CYCLES
from cxl_offload.plan.equations.interleave import shares_of_weights
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.layout import WeightCut, weight_middles
from cxl_offload.plan.hardware import Hardware

_PAGES_BESIDE, _PAGES_A_BATCH = 16, 2

Stripe = tuple[int, ...]
"""Interleave weights, one a tier of the hardware; 0 leaves it out."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate.

    Attributes
    ----------
    cuts
        Index into the job's weight levels of every cut between two homes of weights, ascending.
    weight_stripe, kv_stripe
        Interleave weights of the host's part, or None: whole tensors (sequences) on tiers.
    kv
        Sequences of one GPU batch in every home of KV.
    activations_on_gpu
        All hidden states; else they are on the ``scratch`` tier.
    scratch
        Index of the tier of the workspace, of masks and of hidden states on the host.
    """

    gpu_batch: int
    batches: int
    cuts: tuple[int, ...]
    weight_stripe: Stripe | None
    kv: tuple[int, ...]
    kv_stripe: Stripe | None
    activations_on_gpu: bool
    scratch: int

    @property
    def sequences(self) -> int:
        """All rows of a block."""
        return self.gpu_batch * self.batches

    @property
    def cpu_attention(self) -> bool:
        """Whether attention runs on the CPU: as soon as one sequence is off the GPU."""
        return self.kv[-1] < self.gpu_batch


@dataclass(frozen=True, slots=True)
class Loads:
    """Bytes of a candidate, one entry a host tier where it is a tuple.

    ``scratch`` is what lies on the scratch tier beside weights and KV; ``kv_sequences_host`` are
    sequences of a GPU batch, fractions where a stripe cuts them.
    """

    weights_drive: int
    weights_host: tuple[int, ...]
    weights_gpu: int
    kv_drive: int
    kv_host: tuple[int, ...]
    kv_gpu: int
    kv_share_host: tuple[float, ...]
    scratch: tuple[int, ...]
    gpu_bytes: int

    @property
    def host(self) -> tuple[int, ...]:
        """All bytes of every tier."""
        parts = zip(self.weights_host, self.kv_host, self.scratch, strict=True)
        return tuple(sum(part) for part in parts)


def segments(hardware: Hardware, stripe: Stripe | None) -> tuple[Stripe, ...]:
    """The host's segments: every tier by itself, or the one stripe."""
    tiers = range(len(hardware.nodes))
    if stripe is not None:
        return (stripe,)
    return tuple(tuple(int(at == tier) for at in tiers) for tier in tiers)


def granule_bytes(smallest_tensor: int, stripe: Stripe) -> int | None:
    """A granule that spreads a tensor over the stripe, or None where it is too small for one."""
    room = smallest_tensor // (sum(stripe) * CYCLES)
    return (
        None
        if room < BASE_PAGE_BYTES
        else min(room // BASE_PAGE_BYTES * BASE_PAGE_BYTES, HUGE_PAGE_BYTES)
    )


def page_slack(job: FlexGenJob, batches: int) -> tuple[int, int]:
    """Bytes that whole pages may take beyond tensors, on one node: of weights, of KV.

    A page for every tensor that may lie there, and some for masks and workspaces.
    """
    weights = sum(len(group.shapes) * group.count for group in job.groups) + _PAGES_BESIDE
    return BASE_PAGE_BYTES * weights, BASE_PAGE_BYTES * (job.kv_tensors + _PAGES_A_BATCH) * batches


def _striped(nbytes: int, stripe: Stripe, granule: int) -> list[int]:
    """Bytes a tier of one allocation; on one tier alone all of them."""
    if sum(weight > 0 for weight in stripe) == 1:
        return [nbytes if weight else 0 for weight in stripe]
    placed = stripe_bytes(
        nbytes, {at: weight for at, weight in enumerate(stripe) if weight}, granule
    )
    return [placed.get(at, 0) for at in range(len(stripe))]


def weight_granule(job: FlexGenJob, stripe: Stripe) -> int | None:
    """The granule of striped weights, by the smallest matrix of a layer."""
    matrices = [
        2 * size
        for group in job.groups
        for size, shape in zip(group.sizes, group.shapes, strict=True)
        if len(shape) > 1
    ]
    return granule_bytes(min(matrices), stripe)


def kv_granule(job: FlexGenJob, stripe: Stripe) -> int | None:
    """The granule of striped KV, by the cache of one sequence."""
    return granule_bytes(job.kv_tensor_bytes(1), stripe)


def stripe_slack(job: FlexGenJob, stripe: Stripe | None) -> tuple[float, ...]:
    """Bytes by which striped weights may exceed their shares, a tier.

    A tensor gives a tier less than two granules more than its share: one by the cut cycle, a part
    of one by the cut granule. One too small for a cycle is all on the tier of the largest weight.
    """
    if stripe is None:
        return ()
    granule = weight_granule(job, stripe) or 0
    slack, heaviest = [0.0] * len(stripe), stripe.index(max(stripe))
    for group in job.groups:
        for size in group.sizes:
            if 2 * size < sum(stripe) * granule:
                slack[heaviest] += 2 * size * group.count
            else:
                slack = [have + 2 * granule * group.count for have in slack]
    return tuple(each * (weight > 0) for each, weight in zip(slack, stripe, strict=True))


def kv_stripe_slack(job: FlexGenJob, stripe: Stripe) -> float:
    """The same for the K and V tensors of one GPU batch."""
    if sum(weight > 0 for weight in stripe) == 1:
        return 0.0
    return 2.0 * (kv_granule(job, stripe) or 0) * job.kv_tensors


def _host_weights(
    job: FlexGenJob, levels: tuple[WeightCut, ...], choice: Choice, tiers: int
) -> tuple[int, ...]:
    bounds = [levels[cut].bytes_below for cut in choice.cuts]
    stripe = choice.weight_stripe
    if stripe is None:
        return tuple(high - low for low, high in itertools.pairwise(bounds))
    low, high = (levels[cut].at for cut in choice.cuts)
    granule = weight_granule(job, stripe) or BASE_PAGE_BYTES
    total: Counter[int] = Counter()
    for group in job.groups:
        for nbytes in tensors_between(group.sizes, low, high):
            for at, part in enumerate(_striped(nbytes, stripe, granule)):
                total[at] += part * group.count
    return tuple(total[at] for at in range(tiers))


def tensors_between(sizes: tuple[int, ...], low: float, high: float) -> list[int]:
    """Bytes of the weights of a group that fall between two cuts."""
    middles = zip(sizes, weight_middles(sizes), strict=True)
    return [2 * size for size, middle in middles if low <= middle < high]


def scratch_bytes(job: FlexGenJob, choice: Choice) -> int:
    """Workspace and masks of CPU attention, and hidden states that are not on the GPU."""
    size, copies = choice.gpu_batch, job.copies_on_host(choice.batches)
    total = 0 if choice.activations_on_gpu else copies * job.hidden_bytes(size)
    if choice.cpu_attention:
        total += copies * job.mask_bytes(size)
        total += job.workspace_bytes(choice.batches, size)
    return total


def gpu_need_bytes(job: FlexGenJob, choice: Choice, levels: tuple[WeightCut, ...]) -> int:
    """What the GPU must hold: homes, weights on their way, hidden states, intermediates."""
    weights = job.weight_bytes - levels[choice.cuts[-1]].bytes_below
    loaded = 0 if choice.cuts[-1] == 0 else job.gpu_loaded_bytes
    work = job.gpu_batch_bytes(
        choice.gpu_batch, choice.batches, activations=choice.activations_on_gpu
    )
    return weights + choice.batches * choice.kv[-1] * job.kv_sequence_bytes + loaded + work


def loads_of(
    job: FlexGenJob, hardware: Hardware, choice: Choice, levels: tuple[WeightCut, ...]
) -> Loads:
    """Bytes of a candidate, exact."""
    tiers = len(hardware.nodes)
    drive, *host, gpu = choice.kv
    kv_host, share = [0] * tiers, [0.0] * tiers
    for count, stripe in zip(host, segments(hardware, choice.kv_stripe), strict=True):
        granule = kv_granule(job, stripe) or BASE_PAGE_BYTES
        for at, part in enumerate(_striped(job.kv_tensor_bytes(count), stripe, granule)):
            kv_host[at] += part * job.kv_tensors * choice.batches
            share[at] += count * stripe[at] / sum(stripe) / choice.gpu_batch
    scratch = [0] * tiers
    scratch[choice.scratch] = scratch_bytes(job, choice)
    sequence = job.kv_sequence_bytes * choice.batches
    return Loads(
        weights_drive=levels[choice.cuts[0]].bytes_below,
        weights_host=_host_weights(job, levels, choice, tiers),
        weights_gpu=job.weight_bytes - levels[choice.cuts[-1]].bytes_below,
        kv_drive=drive * sequence,
        kv_host=tuple(kv_host),
        kv_gpu=gpu * sequence,
        kv_share_host=tuple(share),
        scratch=tuple(scratch),
        gpu_bytes=gpu_need_bytes(job, choice, levels),
    )


def block_of(choice: Choice, loads: Loads) -> Block:
    """A candidate as the equations take it."""
    weights, kv = choice.weight_stripe, choice.kv_stripe
    return Block(
        sequences=choice.sequences,
        batches=choice.batches,
        gpu_batch=choice.gpu_batch,
        weights_drive=loads.weights_drive,
        weights_host=loads.weights_host,
        weight_shares=None if weights is None else shares_of_weights(weights),
        kv_drive=choice.kv[0] / choice.gpu_batch,
        kv_host=loads.kv_share_host,
        kv_gpu=choice.kv[-1] / choice.gpu_batch,
        kv_shares=None if kv is None else shares_of_weights(kv),
        activations_gpu=float(choice.activations_on_gpu),
        scratch=choice.scratch,
    )


def phases_of(job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads) -> Phases:
    """What the equations predict for a candidate."""
    return phases_of_block(job, hardware, block_of(choice, loads))
