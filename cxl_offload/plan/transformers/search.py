"""Layout, batch and shares of a decoder of transformers with the most tokens a second.

For every layout a bound; then, best bound first, the linear program with a free number of batches,
and with the whole numbers beside its answer, until no bound is left above the best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import (
    Phases,
    between_products_seconds,
    decode_gpu_seconds,
    decode_rows_seconds,
    first_copy_rate,
    joined_calls_seconds,
    phases_of_block,
    prefill_between_seconds,
    prefill_cpu_seconds,
    prefill_flops,
)
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.homes import (
    Homes,
    block_of,
    homes_of,
    whole_layers,
    whole_percents,
)
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import BATCHES, Layout, fullest, layouts, most_batches
from cxl_offload.plan.transformers.program import Fixed, Shares, SharesProgram, gpu_part_seconds

_TIE = 1e-9
_JOINED_MARGIN = 0.01
"""By how much a cache in two places has to be faster than one in one place: no GPU has measured
what joining the two takes."""

_LARGER = 16
"""Batches of a block up to which their rows are as many as there is room for."""

_SMALLER, _LEAST_LOSS = 9, 1e-3
"""How many smaller blocks are tried where whole percents do not fit, and the share of the sequences
that the first of them does without; every other one loses twice as many more."""

_LESS_ROOM, _LEAST_WORTH = (0.005, 0.01, 0.02), 0.004
"""Where smaller blocks lose more than the second: shares of the room that another search does
without, so that its percents fit as they are."""


@dataclass(frozen=True, slots=True)
class BestHomes:
    """The best homes and what the equations say of them.

    ``tokens_per_s`` is that of the shares before they became whole percents, so that more of
    anything is never slower; ``phases`` are those of the percents.
    """

    homes: Homes
    shares: Shares
    phases: Phases
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Wish:
    """A part of the answer: the home of a kind (or of ``kv``), or nodes that a class is kept off.

    ``homes`` are ``gpu``, ``streamed``, ``cpu`` or ``copies`` by kind, and ``gpu``, ``both`` or
    ``host`` of ``kv``.
    """

    homes: Mapping[str, str] = field(default_factory=dict)
    banned: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def allows(self, layout: Layout) -> bool:
        """Whether a layout has these homes."""
        return all(layout.home_of(kind) == home for kind, home in self.homes.items())


ANYTHING = Wish()


def search(
    job: DecoderJob,
    hardware: Hardware,
    *,
    batches: Sequence[int] = BATCHES,
    most: int | None = None,
    like: BestHomes | None = None,
    wish: Wish = ANYTHING,
) -> BestHomes | None:
    """The homes with the most tokens a second; None where not one sequence fits.

    Parameters
    ----------
    batches
        Rows of an accelerator batch to try.
    most
        Most batches of a block; most rows where there is no accelerator.
    like
        Homes that fit; the search begins with their layout.
    wish
        What is to be kept to.
    """
    queue = []
    counts = _LARGER if most is None else min(most, _LARGER)
    for at, (layout, fit) in enumerate(_every(job, hardware, batches, counts, wish)):
        top = fit if most is None else min(fit, most)
        if top >= 1:
            bound = least_seconds(job, hardware, layout, top)
            queue.append((bound, at, top, layout))
    queue.sort(key=lambda each: (compared(each[3], each[0]), each[1]))
    run = _Search(job, hardware, wish)
    if like is not None:
        for bound, _, top, layout in queue:
            if run.is_like(layout, like.homes.layout):
                run.consider(layout, top, bound)
    run.consider_all(queue)
    found = run.placed(hardware)
    for share in _LESS_ROOM:
        if found is None or found.tokens_per_s >= run.tokens_per_s * (1 - _LEAST_WORTH):
            break
        less = _Search(job, _with_less_room(hardware, share), wish)
        less.consider_all(queue)
        other = less.placed(hardware)
        if other is not None and other.tokens_per_s > found.tokens_per_s:
            found = other
    return found


def _with_less_room(hardware: Hardware, share: float) -> Hardware:
    """All nodes without a share of their room, which is left to whole percents."""
    nodes = (replace(node, usable_bytes=node.usable_bytes * (1 - share)) for node in hardware.nodes)
    return replace(hardware, nodes=tuple(nodes))


def _every(
    job: DecoderJob, hardware: Hardware, batches: Sequence[int], counts: int, wish: Wish
) -> Iterator[tuple[Layout, int]]:
    """Layouts with their most batches: of the listed rows, and of what fills all memory."""
    known: dict[Layout, dict[int, int]] = {}
    for layout in layouts(job, hardware, batches=batches):
        if wish.allows(layout):
            fit = most_batches(job, hardware, layout)
            yield layout, fit
            known.setdefault(replace(layout, rows=1), dict.fromkeys(batches, 0))[layout.rows] = fit
    for layout, found in known.items() if hardware.has_gpu else ():
        yield from fullest(job, hardware, layout, found, counts=counts)


def compared(layout: Layout, seconds: float) -> float:
    """Seconds of a sequence as layouts are compared by."""
    return seconds * (1 + _JOINED_MARGIN) if layout.kv == "both" else seconds


class _Search:
    """The best shares so far, and their seconds as layouts are compared by."""

    def __init__(self, job: DecoderJob, hardware: Hardware, wish: Wish) -> None:
        self._job, self._hardware, self._wish = job, hardware, wish
        self._best: tuple[Layout, Shares] | None = None
        self._seconds = float("inf")

    def is_like(self, layout: Layout, other: Layout) -> bool:
        """Whether a layout differs from another in nothing but the rows of a batch, or less."""
        return not self._hardware.has_gpu or replace(layout, rows=other.rows) == other

    def may_be_better(self, layout: Layout, seconds: float) -> bool:
        """Whether so many seconds a sequence beat the best."""
        return compared(layout, seconds) < self._seconds * (1 - _TIE)

    @property
    def tokens_per_s(self) -> float:
        """Of the best, before its shares are whole percents; 0 where nothing fits."""
        if self._best is None:
            return 0.0
        layout, shares = self._best
        return layout.rows * self._job.generated / shares.seconds

    def consider_all(self, queue: Sequence[tuple[float, int, int, Layout]]) -> None:
        """Layouts with their bounds and most batches, in the order of their bounds."""
        for bound, _, top, layout in queue:
            if not self.may_be_better(layout, bound):
                break
            self.consider(layout, top, bound)

    def consider(self, layout: Layout, most: int, bound: float) -> None:
        """The best of a layout, with the whole numbers of batches beside the best of all.

        Where the fewest rows of a range of numbers read fewer experts than others of it, its
        program is a bound only, and both halves of the range are looked at.
        """
        ranges = [(bound, 1, most)]
        while ranges:
            least_s, fewest, most = heapq.heappop(ranges)
            if not self.may_be_better(layout, least_s):
                return
            relaxed = self._relaxed(layout, (fewest, most), bound)
            if relaxed is None or not self.may_be_better(layout, relaxed.seconds / layout.rows):
                continue
            below = min(max(fewest, int(relaxed.batches + 1e-6)), most)
            for count in dict.fromkeys((below, min(below + 1, most))):
                same = abs(relaxed.batches - count) <= _TIE
                same = same and self._reads_the_same(layout, fewest, count)
                self._consider_count(layout, count, bound, relaxed if same else None)
            if not self._reads_the_same(layout, fewest, most):
                middle = math.isqrt(fewest * most)
                seconds = relaxed.seconds / layout.rows
                for half in ((fewest, middle), (middle + 1, most)):
                    heapq.heappush(ranges, (seconds, *half))

    def _reads_the_same(self, layout: Layout, fewest: int, most: int) -> bool:
        """Whether every number of batches of a range reads the same share of the weights."""
        if self._hardware.has_gpu:  # a pass is over the rows of one batch
            return True
        least, largest = (layout.cpu_read_share(self._job, rows) for rows in (fewest, most))
        return least >= largest * (1 - _TIE)

    def _consider_count(
        self, layout: Layout, count: int, bound: float, shares: Shares | None
    ) -> None:
        """The best of a layout with a number of batches, of which the shares may be known."""
        if shares is None:
            shares = self._relaxed(layout, (count, count), bound)
        if shares is None or not self.may_be_better(layout, shares.seconds / layout.rows):
            return
        shares = self._whole(layout, count, bound, shares)
        if shares is not None and self.may_be_better(layout, shares.seconds / layout.rows):
            self._best = layout, shares
            self._seconds = compared(layout, shares.seconds / layout.rows)

    def _whole(self, layout: Layout, count: int, bound: float, shares: Shares) -> Shares | None:
        """The same with whole layers, and percents of the cache, on the accelerator."""
        resident = kv_gpu = None
        if shares.resident:
            resident = whole_layers(self._job, shares.resident) / self._job.layers
        if layout.kv == "both":
            kv_gpu = whole_percents(shares.kv_gpu) / 100
        fixed = Fixed(resident, kv_gpu)
        return shares if fixed == Fixed() else self._relaxed(layout, (count, count), bound, fixed)

    def _relaxed(
        self,
        layout: Layout,
        batches: tuple[int, int],
        bound: float,
        fixed: Fixed | None = None,
    ) -> Shares | None:
        program = SharesProgram(
            self._job,
            self._hardware,
            layout,
            batches=batches,
            unit_s=bound * layout.rows,
            banned=self._wish.banned,
            fixed=fixed,
        )
        return program.solve()

    def placed(self, hardware: Hardware) -> BestHomes | None:
        """The best in whole percents; with fewer batches where they need some room beside.

        ``hardware`` may have more room than the search had.
        """
        if self._best is None:
            return None
        layout, shares = self._best
        for lost in range(_SMALLER):
            homes = homes_of(self._job, hardware, layout, shares)
            if homes is not None:
                block = block_of(self._job, hardware, homes)
                phases = phases_of_block(self._job, hardware, block)
                rate = layout.rows * self._job.generated / shares.seconds
                return BestHomes(homes, shares, phases, rate)
            smaller = self._smaller(layout, round(shares.batches), 1 - _LEAST_LOSS * 2**lost)
            if smaller is None:
                return None
            layout, shares = smaller
        return None

    def _smaller(self, layout: Layout, count: int, share: float) -> tuple[Layout, Shares] | None:
        """A share of the sequences of a block: fewer batches, or smaller ones where one is many."""
        if count * (1 - share) >= 1 or not self._hardware.has_gpu:
            count = min(count - 1, int(count * share))
        else:
            layout = replace(layout, rows=min(layout.rows - 1, int(layout.rows * share)))
        if count < 1 or layout.rows < 1:
            return None
        shares = self._relaxed(layout, (count, count), self._seconds)
        if shares is not None:
            shares = self._whole(layout, count, self._seconds, shares)
        return None if shares is None else (layout, shares)


def least_seconds(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """Seconds of a sequence that nothing of this layout undercuts.

    Every term by itself, over all nodes together, with the most batches.
    """
    engine, rows, link = job.engine, layout.rows, hardware.link_bytes_per_s
    reads = sum(node.read_bytes_per_s for node in hardware.nodes)
    copies = min(link, sum(node.copy_bytes_per_s for node in hardware.nodes))
    streamed = least_streamed_bytes(job, hardware, layout, most) / copies
    on_cpu = layout.bytes_of(job, layout.on_cpu)
    params = sum(job.kinds[kind].met for kind in layout.multiplied)
    mean = rows * job.mean_kv_tokens * job.kv_bytes_per_token
    batch = rows if hardware.has_gpu else most  # the more rows, the fewer bytes for each
    work = decode_gpu_seconds(
        job,
        hardware,
        rows,
        params_cpu=params,
        cpu_bytes=float(on_cpu),
        unread=layout.unread_bytes(job, batch),
    )
    work += between_products_seconds(job, hardware) / most
    work += decode_rows_seconds(job, hardware, rows)
    if layout.kv == "gpu":
        work += mean / hardware.gpu.memory_bytes_per_s
    else:
        flops = 4 * rows * job.mean_kv_tokens * job.query_width * job.layers
        arithmetic = flops / (hardware.cores * engine.attention_flops_per_core)
        on_host, there = max(mean / reads / engine.attention_share, arithmetic), 0.0
        if layout.kv == "both":
            work += joined_calls_seconds(job)
            there = most_kv_there(job, hardware, layout)
        on_gpu = gpu_part_seconds(job, hardware, rows)
        work += on_host + min(0.0, on_gpu - on_host) * there
    if layout.multiplied:
        passes = 1.0 if hardware.has_gpu else 1.0 / most
        arithmetic = 2 * rows * params / (hardware.cores * engine.products_flops_per_core)
        seconds = on_cpu * layout.cpu_read_share(job, batch) / reads
        if layout.copied:
            seconds += layout.bytes_of(job, layout.copied) / hardware.near_bytes_per_s
        work += passes * seconds / engine.products_share + arithmetic
    prefill = _least_prefill(job, hardware, layout, most, streamed=streamed)
    return (prefill + (job.generated - 1) * max(streamed, work)) / rows


def least_streamed_bytes(job: DecoderJob, hardware: Hardware, layout: Layout, most: int) -> float:
    """What is streamed for a batch when as many layers as there is room for stay on the GPU.

    Every batch takes a part of that room, so that with fewer batches more layers stay, but each
    batch has more of what is streamed.
    """
    total, room = layout.bytes_of(job, layout.streamed), layout.gpu_room(job, hardware)
    top = layout.most_resident_bytes(job)
    if total <= room:
        return (total - top) / most
    held: float = layout.held_bytes(job, layout.rows)
    if layout.kv == "gpu":
        held += layout.rows * job.kv_sequence_bytes
    one = max(1.0, layout.layered_bytes(job) / job.layers)
    layers = int(max(0.0, min(top, room - most * held)) / one + 1e-6)
    with_most = (total - layers * one) / most
    if most == 1:
        return with_most
    return min(with_most, max(total - top, total - room + (most - 1) * held) / (most - 1))


def most_kv_there(job: DecoderJob, hardware: Hardware, layout: Layout) -> float:
    """The largest share of the cache that the GPU has room for, with one batch."""
    room = layout.gpu_room(job, hardware) - layout.held_bytes(job, layout.rows)
    return float(min(1.0, max(0.0, room) / (layout.rows * job.kv_sequence_bytes)))


def _least_prefill(
    job: DecoderJob,
    hardware: Hardware,
    layout: Layout,
    most: int,
    *,
    streamed: float,
) -> float:
    """Of one batch; ``streamed`` seconds of copies a batch."""
    engine, rows = job.engine, layout.rows
    on_cpu = layout.bytes_of(job, layout.on_cpu)
    stored = 0.0
    if layout.kv != "gpu":
        stored = rows * job.prompt * job.kv_bytes_per_token * min(kv_store_costs(engine, hardware))
    if layout.kv == "both":
        stored *= 1 - most_kv_there(job, hardware, layout)
    if hardware.has_gpu:
        arithmetic = prefill_flops(job, rows) / hardware.gpu.products_flops_per_s
        return max(arithmetic, stored, streamed)
    reads = sum(node.read_bytes_per_s for node in hardware.nodes)
    arithmetic = prefill_cpu_seconds(job, hardware, rows)
    read = on_cpu / reads
    if layout.copied:
        read += layout.bytes_of(job, layout.copied) / first_copy_rate(hardware)
    once = read / engine.products_share + prefill_between_seconds(job, hardware)
    return max(arithmetic + once / most, stored)
