"""Layout, batch and shares of a decoder of transformers with the most tokens a second.

For every layout a bound; then, best bound first, the linear program with a free number of batches,
and with the whole numbers beside its answer, until no bound is left above the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import (
    Phases,
    decode_gpu_seconds,
    phases_of_block,
    prefill_flops,
)
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.homes import Homes, block_of, homes_of
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import BATCHES, Layout, layouts, most_batches
from cxl_offload.plan.transformers.program import Shares, SharesProgram

_TIE = 1e-9
_LARGER = 16
"""Batches of a block up to which their rows are any number."""

_FEWER = 16
"""Halvings of the number of batches at which percents stop being tried."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best homes and what the equations say of them.

    ``tokens_per_s`` is that of the shares before they became whole percents, so that more of
    anything is never slower; ``phases`` are those of the percents.
    """

    homes: Homes
    shares: Shares
    phases: Phases
    tokens_per_s: float


def search(
    job: DecoderJob,
    hardware: Hardware,
    *,
    batches: Sequence[int] = BATCHES,
    most: int | None = None,
    like: Found | None = None,
) -> Found | None:
    """The homes with the most tokens a second; None where not one sequence fits.

    Parameters
    ----------
    batches
        Rows of an accelerator batch to try.
    most
        Most batches of a block; most rows where there is no accelerator.
    like
        Homes that fit; the search begins with their layout.
    """
    queue = []
    for at, layout in enumerate(layouts(job, hardware, batches=batches)):
        top = most_batches(job, hardware, layout)
        top = top if most is None else min(top, most)
        if top >= 1:
            queue.append((least_seconds(job, hardware, layout, top), at, top, layout))
    if like is not None:
        first = like.homes.layout
        queue.sort(key=lambda each: (not _is_like(each[3], first, hardware), each[0]))
    else:
        queue.sort(key=lambda each: each[:2])
    best: Found | None = None
    for bound, _, top, layout in queue:
        if best is not None and bound >= _sequence_seconds(job, best) * (1 - _TIE):
            if like is None:
                break
            continue
        found = _best_of(job, hardware, layout, top, bound, best)
        if found is not None:
            best = found
    return best if best is None or most is not None else _finer(job, hardware, best)


def _finer(job: DecoderJob, hardware: Hardware, best: Found) -> Found:
    """As many sequences in fewer, larger batches: what does not fill a batch is not lost."""
    first = best.homes.layout
    if not hardware.has_gpu:
        return best
    top = most_batches(job, hardware, replace(first, rows=1))
    for count in range(1, _LARGER + 1):
        layout = replace(first, rows=top // count)
        fits = layout.gpu_bytes(job) <= hardware.gpu_usable_bytes
        if not 1 <= layout.rows <= max(BATCHES) or not fits:
            continue
        most = most_batches(job, hardware, layout)
        bound = least_seconds(job, hardware, layout, most) if most else float("inf")
        if bound < _sequence_seconds(job, best) * (1 - _TIE):
            best = _best_of(job, hardware, layout, most, bound, best) or best
    return best


def _is_like(layout: Layout, other: Layout, hardware: Hardware) -> bool:
    return not hardware.has_gpu or layout == other


def _sequence_seconds(job: DecoderJob, found: Found) -> float:
    return job.generated / found.tokens_per_s


def _best_of(
    job: DecoderJob,
    hardware: Hardware,
    layout: Layout,
    most: int,
    bound: float,
    best: Found | None,
) -> Found | None:
    """The best of a layout where it is better than the best so far."""
    unit = bound * layout.rows

    def solved(count: int | None) -> Shares | None:
        program = SharesProgram(job, hardware, layout, batches=count, most=most, unit_s=unit)
        return program.solve()

    def is_better(shares: Shares) -> bool:
        seconds = shares.seconds / layout.rows
        return best is None or seconds < _sequence_seconds(job, best) * (1 - _TIE)

    relaxed = solved(None)
    if relaxed is None or not is_better(relaxed):
        return None
    below = max(1, int(relaxed.batches + 1e-6))
    tried = [
        shares
        for count in dict.fromkeys((below, min(below + 1, most)))
        if (shares := solved(count)) is not None and is_better(shares)
    ]
    for shares in sorted(tried, key=lambda each: each.seconds):
        found = _whole(job, hardware, layout, shares)
        if found is not None:
            return found
    for _ in range(_FEWER):  # full to the brim: percents need some room beside
        fewer = solved(below := below - max(1, below // 100)) if below > 1 else None
        if fewer is None or not is_better(fewer):
            return None
        found = _whole(job, hardware, layout, fewer)
        if found is not None:
            return found
    return None


def _whole(job: DecoderJob, hardware: Hardware, layout: Layout, shares: Shares) -> Found | None:
    homes = homes_of(job, hardware, layout, shares)
    if homes is None:
        return None
    phases = phases_of_block(job, hardware, block_of(job, hardware, homes))
    rate = layout.rows * job.generated / shares.seconds
    return Found(homes, shares, phases, rate)


def least_seconds(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """Seconds of a sequence that nothing of this layout undercuts.

    Every term by itself, over all nodes together, with the most batches.
    """
    engine, rows, link = job.engine, layout.rows, hardware.link_bytes_per_s
    reads = sum(node.read_bytes_per_s for node in hardware.nodes)
    copies = min(link, sum(node.copy_bytes_per_s for node in hardware.nodes))
    streamed = layout.bytes_of(job, layout.streamed) / copies / most
    on_cpu = layout.bytes_of(job, layout.on_cpu)
    params = sum(job.kinds[kind].met for kind in layout.on_cpu)
    mean = rows * job.mean_kv_tokens * job.kv_bytes_per_token
    work = decode_gpu_seconds(job, hardware, rows, params_cpu=params, cpu_bytes=float(on_cpu))
    if layout.kv_on_gpu:
        work += mean / hardware.gpu.memory_bytes_per_s
    else:
        flops = 4 * rows * job.mean_kv_tokens * job.query_width * job.layers
        arithmetic = flops / (hardware.cores * engine.attention_flops_per_core)
        work += max(mean / reads / engine.attention_share, arithmetic)
    if on_cpu:
        passes = 1.0 if hardware.has_gpu else 1.0 / most
        arithmetic = 2 * rows * params / (hardware.cores * engine.products_flops_per_core)
        work += max(passes * on_cpu / reads / engine.products_share, arithmetic)
    flops = prefill_flops(job, rows)
    stored = 0.0
    if not layout.kv_on_gpu:
        stored = rows * job.prompt * job.kv_bytes_per_token * min(kv_store_costs(engine, hardware))
    if hardware.has_gpu:
        arithmetic = flops / (hardware.gpu.flops_per_s * PREFILL_EFFICIENCY)
        prefill = max(arithmetic, stored, streamed + on_cpu / copies / most)
    else:
        arithmetic = flops / (hardware.cores * engine.prefill_flops_per_core)
        prefill = max(arithmetic, stored)
    return (prefill + (job.generated - 1) * max(streamed, work)) / rows
