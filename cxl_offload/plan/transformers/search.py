"""Layout, batch and shares of a decoder of transformers with the most tokens a second.

For every layout a bound; then, best bound first, the linear program with a free number of batches,
and with the whole numbers beside its answer, until no bound is left above the best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cxl_offload.plan.better_hardware import better_everywhere
from cxl_offload.plan.decoding.phases import Phases, phases_of_block
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.bound import closer_seconds, least_of_states
from cxl_offload.plan.transformers.homes import (
    Homes,
    block_of,
    homes_of,
    whole_layers,
    whole_percents,
)
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import BATCHES, Layout, layouts, states_on_host
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.plan.transformers.queues import Entry, Queues, compared
from cxl_offload.plan.transformers.shares import Fixed, Shares

_TIE = 1e-9

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
    anything is never slower; ``phases`` are those of the percents. ``least`` keeps the seconds that
    nothing of a layout undercuts on hardware that is better everywhere than ``hardware``, for which
    they were found, by what it has more.
    """

    homes: Homes
    shares: Shares
    phases: Phases
    tokens_per_s: float
    hardware: Hardware
    least: dict[tuple[float, ...], Mapping[Layout, float]] = field(
        default_factory=dict, compare=False, repr=False
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """A part of the answer: the home of a kind (or of ``kv``), or nodes that a class is kept off.

    ``homes`` are ``gpu``, ``streamed``, ``cpu`` or ``copies`` by kind, ``gpu``, ``both`` or
    ``host`` of ``kv``, and ``gpu`` or ``host`` of hidden states.
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
    counts = _LARGER if most is None else min(most, _LARGER)
    every = list(layouts(job, hardware, batches=batches))
    queues = Queues(job, hardware, batches, counts, most)
    least = {} if like is None else _least_everywhere(job, hardware, like, queues)
    run, on_host = (_Search(job, hardware, wish, least) for _ in range(2))
    queue = queues.of((each for each in every if wish.allows(each)), lambda _: True)
    if like is not None and like.homes.layout.states == "host":
        on_host.consider_all(queues.of_one(like.homes.layout))
        run.has_to_beat(on_host.seconds)
    elif like is not None:
        for bound, _, top, layout in queue:
            if run.is_like(layout, like.homes.layout):
                run.consider(layout, top, bound)
    run.consider_all(queue)
    found = _placed(run, queue)
    on_host.has_to_beat(_compared(job, found))
    others = [each for each in states_on_host(every) if wish.allows(each)]
    known = None if like is None else like.homes.layout
    more = queues.of(
        others,
        # of the layout that is best, other numbers of rows may use what there is more of
        lambda each: on_host.may_gain(each) or (known is not None and run.is_like(each, known)),
    )
    on_host.consider_all(more)
    moved = _placed(on_host, more)
    if found is None or moved is None:
        return found or moved
    # A cache in two places that is passed over by its margin is the faster plan all the same.
    faster = moved.tokens_per_s > found.tokens_per_s
    return moved if faster and _compared(job, moved) < _compared(job, found) else found


def _least_everywhere(
    job: DecoderJob, hardware: Hardware, like: BestHomes, queues: Queues
) -> Mapping[Layout, float]:
    """Seconds that nothing of a layout undercuts, on hardware that is better everywhere.

    Worked out once for all that are no better, of the layouts that may beat what is known.
    """
    shared = better_everywhere(like.hardware, hardware)
    if shared is None:
        return {}
    if shared.more not in like.least:
        run = _Search(job, shared.hardware, ANYTHING)
        run.has_to_beat(_compared(job, like))
        offered = replace(queues, hardware=shared.hardware)
        every = list(layouts(job, shared.hardware, batches=queues.batches))
        run.bound_all(offered.of(every, lambda _: True))
        run.bound_all(offered.of(states_on_host(every), run.may_gain))
        like.least[shared.more] = run.at_least
    return like.least[shared.more]


def _placed(run: _Search, queue: Sequence[Entry]) -> BestHomes | None:
    """The best of a search in whole percents; with room left to these where they lose much."""
    found, more = run.placed(run.hardware), run
    for share in _LESS_ROOM:
        if found is None or found.tokens_per_s >= run.tokens_per_s * (1 - _LEAST_WORTH):
            break
        less = _Search(run.job, run.hardware.with_less_room(share), run.wish, more.at_least)
        less.limit_s = run.job.generated / found.tokens_per_s
        less.consider_all(queue)
        if less.finds_nothing:  # nor would one with still less room
            break
        other = less.placed(run.hardware)
        if other is not None and other.tokens_per_s > found.tokens_per_s:
            found = other
        more = less
    return found


def _compared(job: DecoderJob, found: BestHomes | None) -> float:
    """Seconds of a sequence, as what was found is compared by."""
    if found is None:
        return math.inf
    return compared(found.homes.layout, job.generated / found.tokens_per_s)


class _Search:
    """The best shares so far, and the seconds that others have to beat, as layouts are compared.

    ``at_least`` has the seconds of a sequence that nothing of a layout undercuts, as its program
    found them, here or with more of everything; ``limit_s`` is what any layout has to undercut.
    """

    def __init__(
        self,
        job: DecoderJob,
        hardware: Hardware,
        wish: Wish,
        at_least: Mapping[Layout, float] = MappingProxyType({}),
    ) -> None:
        self.job, self.hardware, self.wish = job, hardware, wish
        self.at_least = dict(at_least)
        self._best: tuple[Layout, Shares] | None = None
        self.seconds = self.limit_s = math.inf

    def has_to_beat(self, seconds: float) -> None:
        """What is not faster is not looked at."""
        self.seconds = min(self.seconds, seconds)

    def is_like(self, layout: Layout, other: Layout) -> bool:
        """Whether a layout differs from another in nothing but the rows of a batch, or less."""
        return not self.hardware.has_gpu or layout.with_rows(other.rows) == other

    def may_be_better(self, layout: Layout, seconds: float) -> bool:
        """Whether so many seconds a sequence beat the best."""
        return seconds < self.limit_s and not self._is_beaten(layout, seconds)

    def _is_beaten(self, layout: Layout, seconds: float) -> bool:
        return compared(layout, seconds) >= self.seconds * (1 - _TIE)

    def may_gain(self, layout: Layout) -> bool:
        """Whether hidden states on the host may beat the best, however many batches there are."""
        return self.may_be_better(layout, least_of_states(self.job, self.hardware, layout))

    @property
    def finds_nothing(self) -> bool:
        """Whether nothing was better than what it had to beat."""
        return self._best is None

    @property
    def tokens_per_s(self) -> float:
        """Of the best, before its shares are whole percents; 0 where nothing fits."""
        if self._best is None:
            return 0.0
        layout, shares = self._best
        return layout.rows * self.job.generated / shares.seconds

    def consider_all(self, queue: Sequence[Entry]) -> None:
        """Layouts with their bounds and most batches, in the order of their bounds."""
        for bound, _, top, layout in queue:
            if self._is_beaten(layout, bound):
                break
            self.consider(layout, top, bound)

    def bound_all(self, queue: Sequence[Entry]) -> None:
        """Only the least seconds of each layout that may beat what there is to beat."""
        for bound, _, top, layout in queue:
            if self._is_beaten(layout, bound):
                break
            self._bound_by_program(layout, top, bound)

    def _bound_by_program(self, layout: Layout, most: int, bound: float) -> Shares | None:
        """Of any number of batches, together; the shares are a bound's."""
        relaxed = self._relaxed(layout, (layout.fewest_batches, most), bound)
        self.at_least[layout] = math.inf if relaxed is None else relaxed.seconds / layout.rows
        return relaxed

    def consider(self, layout: Layout, most: int, bound: float) -> None:
        """The best of a layout, with the whole numbers of batches beside the best of all.

        Where the fewest rows of a range of numbers read fewer experts than others of it, its
        program is a bound only, and both halves of the range are looked at.
        """
        fewest = layout.fewest_batches
        whole = fewest, most
        known = max(bound, self.at_least.get(layout, 0.0))
        if self.may_be_better(layout, known):
            known = max(known, closer_seconds(self.job, self.hardware, layout, whole))
        ranges = [(known, fewest, most)]
        while ranges:
            least_s, fewest, most = heapq.heappop(ranges)
            if not self.may_be_better(layout, least_s):
                return
            if (fewest, most) == whole:
                relaxed = self._bound_by_program(layout, most, bound)
            else:
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
        if self.hardware.has_gpu:  # a pass is over the rows of one batch
            return True
        least, largest = (layout.cpu_read_share(self.job, rows) for rows in (fewest, most))
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
            self.seconds = compared(layout, shares.seconds / layout.rows)

    def _whole(self, layout: Layout, count: int, bound: float, shares: Shares) -> Shares | None:
        """The same with whole layers, and percents of the cache, on the accelerator."""
        resident = kv_gpu = None
        if shares.resident:
            resident = whole_layers(self.job, shares.resident) / self.job.layers
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
            self.job,
            self.hardware,
            layout,
            batches=batches,
            unit_s=bound * layout.rows,
            banned=self.wish.banned,
            fixed=fixed,
        )
        return program.solve()

    def placed(self, hardware: Hardware) -> BestHomes | None:
        """The best in whole percents; where they do not fit in finer parts, or with fewer batches.

        ``hardware`` may have more room than the search had.
        """
        if self._best is None:
            return None
        layout, shares = self._best
        for lost in range(_SMALLER):
            homes = homes_of(self.job, hardware, layout, shares)
            if homes is not None:
                block = block_of(self.job, hardware, homes)
                phases = phases_of_block(self.job, hardware, block)
                rate = layout.rows * self.job.generated / shares.seconds
                return BestHomes(homes, shares, phases, rate, hardware)
            smaller = self._smaller(layout, round(shares.batches), 1 - _LEAST_LOSS * 2**lost)
            if smaller is None:
                return None
            layout, shares = smaller
        return None

    def _smaller(self, layout: Layout, count: int, share: float) -> tuple[Layout, Shares] | None:
        """A share of the sequences of a block: fewer batches, or smaller ones where one is many."""
        if count * (1 - share) >= 1 or not self.hardware.has_gpu:
            count = min(count - 1, int(count * share))
        else:
            layout = layout.with_rows(min(layout.rows - 1, int(layout.rows * share)))
        if count < layout.fewest_batches or layout.rows < 1:
            return None
        shares = self._relaxed(layout, (count, count), self.seconds)
        if shares is not None:
            shares = self._whole(layout, count, self.seconds, shares)
        return None if shares is None else (layout, shares)
