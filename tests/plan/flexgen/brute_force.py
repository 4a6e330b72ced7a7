"""Every choice of a small FlexGen instance, one after the other: the oracle of the planner.

Knows what a choice holds and what the equations say of it, and nothing of programs and bounds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cxl_offload.plan.decoding.engine import OWN, STOCK
from cxl_offload.plan.flexgen.choice import (
    Choice,
    Loads,
    Stripe,
    kv_stripe_slack,
    loads_of,
    page_slack,
    phases_of,
    segments,
    stripe_slack,
)
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.layout import WeightGroup
from cxl_offload.plan.flexgen.mode import Mode, Ratios
from cxl_offload.plan.flexgen.planner import modes
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode

MIB = 1 << 20


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out ``total`` over ``parts``."""
    for bars in itertools.combinations(range(total + parts - 1), parts - 1):
        edges = (-1, *bars, total + parts - 1)
        yield tuple(high - low - 1 for low, high in itertools.pairwise(edges))


def single_modes(job: FlexGenJob, hardware: Hardware, gpu_batches: Sequence[int]) -> Iterator[Mode]:
    """The planner's modes with every stripe by itself."""
    for mode in modes(job, hardware, gpu_batches=gpu_batches):
        for weights, kv in itertools.product(
            single_stripes(mode.weight_stripe), single_stripes(mode.kv_stripe)
        ):
            yield replace(mode, weight_stripe=weights, kv_stripe=kv)


def single_stripes(stripe: Stripe | Ratios | None) -> list[Stripe | None]:
    """What a mode may become: of two tiers that is any sixteenth, counted by hand."""
    if not isinstance(stripe, Ratios):
        return [stripe]
    tiers = itertools.product(*(range(low, high + 1) for low, high in stripe.limits))
    return [each for each in tiers if sum(each) == 16 and sum(weight > 0 for weight in each) > 1]


def choices(job: FlexGenJob, hardware: Hardware, mode: Mode, batches: int) -> Iterator[Choice]:
    """Every choice of a mode and a number of batches, fitting or not."""
    top = len(job.levels())
    homes = len(segments(hardware, mode.weight_stripe)) + 2
    kv_homes = len(segments(hardware, mode.kv_stripe)) + 2
    for cuts in itertools.combinations_with_replacement(range(top), homes - 1):
        for kv in compositions(mode.gpu_batch, kv_homes):
            if (kv[-1] == mode.gpu_batch) != mode.kv_on_gpu:
                continue
            if not hardware.drive_usable_bytes and (cuts[0] or kv[0]):
                continue
            if kv[0] and not job.engine.kv_drive_store_bytes_per_s:
                continue
            for act, scratch in itertools.product((False, True), range(len(hardware.nodes))):
                if act and mode.kv_on_gpu and scratch:
                    continue  # nothing is on the scratch tier, wherever that is
                yield Choice(
                    gpu_batch=mode.gpu_batch,
                    batches=batches,
                    cuts=cuts,
                    weight_stripe=mode.weight_stripe,
                    kv=kv,
                    kv_stripe=mode.kv_stripe,
                    activations_on_gpu=act,
                    scratch=scratch,
                )


def fits(job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads) -> bool:
    """Whether every home has room; striped homes are charged a granule a tensor."""
    if loads.gpu_bytes > hardware.gpu_usable_bytes:
        return False
    if loads.weights_drive + loads.kv_drive > hardware.drive_usable_bytes:
        return False
    host = [float(nbytes + sum(page_slack(job, choice.batches))) for nbytes in loads.host]
    if choice.weight_stripe is not None:
        total = sum(loads.weights_host)
        slack = stripe_slack(job, choice.weight_stripe)
        for at, weight in enumerate(choice.weight_stripe):
            ideal = total * weight / sum(choice.weight_stripe) + slack[at]
            assert loads.weights_host[at] <= ideal + 1e-6
            host[at] += ideal - loads.weights_host[at]
    if choice.kv_stripe is not None:
        total = choice.kv[1] * choice.batches * job.kv_sequence_bytes
        for at, weight in enumerate(choice.kv_stripe):
            ideal = total * weight / sum(choice.kv_stripe)
            if weight:
                ideal += kv_stripe_slack(job, choice.kv_stripe) * choice.batches
            assert loads.kv_host[at] <= ideal + 1e-6
            host[at] += ideal - loads.kv_host[at]
    return all(have <= tier.usable_bytes for have, tier in zip(host, hardware.nodes, strict=True))


def best_by_hand(
    job: FlexGenJob, hardware: Hardware, offered: Iterable[Mode], most_batches: int
) -> tuple[float, Choice] | None:
    """The most tokens a second of all choices of some modes that fit."""
    levels = job.levels()
    best: tuple[float, Choice] | None = None
    for mode in offered:
        for batches in range(1, most_batches + 1):
            for choice in choices(job, hardware, mode, batches):
                loads = loads_of(job, hardware, choice, levels)
                if not fits(job, hardware, choice, loads):
                    continue
                rate = phases_of(job, hardware, choice, loads).tokens_per_s
                if best is None or rate > best[0]:
                    best = (rate, choice)
    return best


def random_instance(seed: int) -> tuple[FlexGenJob, Hardware]:
    """A few odd tensors and two tiers, so tight that something always has to give."""
    rng = random.Random(seed)
    width, heads = rng.choice([(512, 8), (1024, 8), (2048, 16)])
    layers = rng.randint(2, 8)
    groups = [
        WeightGroup(
            tuple((rng.randint(1, 4) * 512, width) for _ in range(rng.randint(1, 2))), layers
        ),
        WeightGroup(((rng.randint(1, 4) * 1024, width), (width,)), 1),
    ]
    job = FlexGenJob(
        groups=tuple(groups),
        params=sum(sum(group.sizes) * group.count for group in groups),
        layers=layers,
        width=width,
        heads=heads,
        kv_width=width,
        vocab=rng.choice([64, 512]),
        prompt=rng.choice([1, 16, 64, 512]),
        generated=rng.randint(2, 32),
        engine=OWN if seed % 2 else STOCK,
    )
    need = job.weight_bytes + 4 * job.kv_sequence_bytes
    work = job.gpu_work_bytes(2) + job.gpu_loaded_bytes + 4 * job.hidden_bytes(2)
    reads = sorted((rng.uniform(5e9, 4e11) for _ in range(2)), reverse=rng.random() < 0.8)
    tiers = tuple(
        HostNode(
            name=name,
            tier=name,
            node=at,
            read_bytes_per_s=reads[at],
            latency_ns=rng.uniform(90, 350),
            copy_bytes_per_s=rng.choice([reads[at], 2e10, 1e11]),
            usable_bytes=need * rng.uniform(0.05, 0.9),
        )
        for at, name in enumerate(("ldram", "cxl"))
    )
    drive = rng.random() < 0.4
    return job, Hardware(
        machine="random",
        nodes=tiers,
        link_bytes_per_s=rng.choice([1.2e10, 2.5e10, 6.4e10, 4e11]),
        local_latency_ns=rng.uniform(80, 140),
        gpu=GpuRates(rng.uniform(1e13, 1e15), rng.uniform(2e11, 3e12)),
        gpu_memory_bytes=0.0,
        gpu_usable_bytes=work * rng.uniform(0.85, 1.1) + need * rng.choice([0.0, 0.0, 0.05, 0.3]),
        cores=rng.choice([16, 4000, 40000]),
        drive_read_bytes_per_s=rng.uniform(1e9, 1e10) if drive else 0.0,
        drive_write_bytes_per_s=rng.uniform(5e8, 5e9) if drive else 0.0,
        drive_usable_bytes=need * rng.uniform(0.0, 1.0) if drive else 0.0,
    )
