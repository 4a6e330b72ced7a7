"""One step at a time, for steps that no others are like."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cxl_offload.sim.resources import Demand
from cxl_offload.sim.sharing import speeds
from cxl_offload.sim.work import DUST, Work

__all__ = ["OneByOne", "Spans"]

Spans = list[tuple[float, float]]
"""Begin and end of every event of a queue, from the step's begin on."""

_Job = tuple[float, float, int]
"""Set-up seconds, seconds alone, and the number of the shape."""

_REMEMBERED = 50_000
_PER_MILLION = 1e6


class OneByOne:
    """Runs steps and remembers what it has worked out before.

    Events whose demands differ in size alone share resources alike: they have one shape.
    Proportions are taken to a millionth for that, so that sizes rounded to bytes do not differ.
    """

    def __init__(self, work: Work) -> None:
        self._losses = work.losses
        # Plain lists: steps are too short for arrays to pay.
        self._setup_s: list[float] = work.setup_s.tolist()
        self._alone_s: list[float] = work.alone_s.tolist()
        self._kind_of: list[int] = work.kind_of.tolist()
        self._row_of: list[int] = work.row_of.tolist()
        self._resources = work.resources
        self._shares: list[list[list[float]]] = [shares.tolist() for shares in work.shares]
        self._shapes: list[Demand] = []
        self._shape_numbers: dict[tuple[object, ...], int] = {}
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        self._known: dict[tuple[tuple[_Job, ...], ...], list[Spans]] = {}

    def run(self, queues: Sequence[Sequence[int]]) -> list[Spans]:
        """Begin and end of every event of a step; ``queues`` are event numbers."""
        jobs = [self._jobs(queue) for queue in queues]
        if not self._losses and (len(queues) == 1 or self._independent(queues)):
            return [_in_a_row(queue) for queue in jobs]
        key = tuple(jobs)
        spans = self._known.get(key)
        if spans is None:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            spans = self._known[key] = self._share(jobs)
        return spans

    def _jobs(self, queue: Sequence[int]) -> tuple[_Job, ...]:
        setup_s, alone_s = self._setup_s, self._alone_s
        return tuple([(setup_s[event], alone_s[event], self._shape(event)) for event in queue])

    def _shape(self, event: int) -> int:
        kind = self._kind_of[event]
        shares = self._shares[kind][self._row_of[event]]
        parts = tuple([int(share * _PER_MILLION + 0.5) for share in shares])
        number = self._shape_numbers.get((kind, parts))
        if number is None:
            number = self._shape_numbers[kind, parts] = len(self._shapes)
            proportions = zip(self._resources[kind], parts, strict=True)
            self._shapes.append({at: part / _PER_MILLION for at, part in proportions if part > 0})
        return number

    def _independent(self, queues: Sequence[Sequence[int]]) -> bool:
        """Whether no two queues ever need the same resource."""
        seen: set[int] = set()
        for queue in queues:
            kinds = {self._kind_of[event] for event in queue}
            own: set[int] = set().union(*[self._resources[kind] for kind in kinds])
            if not seen.isdisjoint(own):
                return False
            seen |= own
        return True

    def _share(self, queues: Sequence[Sequence[_Job]]) -> list[Spans]:
        """Event by event: the next thing that happens is the end of a set-up or of a job."""
        spans: list[Spans] = [[] for _ in queues]
        ahead = [iter(queue[1:]) for queue in queues]
        begun = [0.0] * len(queues)
        setup = [queue[0][0] for queue in queues]
        left = [queue[0][1] for queue in queues]  # seconds alone
        shape = [queue[0][2] for queue in queues]
        live = list(range(len(queues)))
        now = 0.0
        while live:
            working = [at for at in live if setup[at] == 0.0 and left[at] > 0.0]
            speed = self._speeds_of(tuple([shape[at] for at in working]))
            wait = math.inf if working else 0.0
            for at, s in zip(working, speed, strict=True):
                needed = left[at] / s
                if needed < wait:
                    wait = needed
            preparing = [at for at in live if setup[at] > 0.0]
            if len(working) + len(preparing) < len(live):
                wait = 0.0  # a job that moves nothing is over at once
            elif preparing:
                soonest = min([setup[at] for at in preparing])
                wait = min(wait, soonest) if working else soonest
            now += wait
            for at, s in zip(working, speed, strict=True):
                rest = left[at] - wait * s
                left[at] = rest if rest > DUST * left[at] else 0.0
            for at in preparing:
                rest = setup[at] - wait
                setup[at] = rest if rest > DUST * setup[at] else 0.0
            for at in [at for at in live if setup[at] == 0.0 and left[at] == 0.0]:
                spans[at].append((begun[at], now))
                job = next(ahead[at], None)
                if job is None:
                    live.remove(at)
                    continue
                begun[at] = now
                setup[at], left[at], shape[at] = job
        return spans

    def _speeds_of(self, shapes: tuple[int, ...]) -> list[float]:
        known = self._speeds.get(shapes)
        if known is None:
            if len(self._speeds) > _REMEMBERED:
                self._speeds.clear()
            shared = [self._shapes[at] for at in shapes]
            known = speeds(shared, self._losses) if shapes else []
            self._speeds[shapes] = known
        return known


def _in_a_row(queue: Sequence[_Job]) -> Spans:
    spans = []
    now = 0.0
    for setup_s, seconds, _ in queue:
        end = now + setup_s + seconds
        spans.append((now, end))
        now = end
    return spans
