"""Many steps at once: steps whose queues hold the same kinds of events, whatever their sizes.

All of them advance together, each by its own time to its own next end of a set-up or of a job.
Steps in which the same events are at work are served by one computation over arrays. It follows
:mod:`cxl_offload.sim.serial` and :mod:`cxl_offload.sim.sharing`, which say the same one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cxl_offload.sim.columns import Floats, Integers
from cxl_offload.sim.work import DUST, Work

__all__ = ["run_together", "speeds_together"]

_EPSILON = 1e-12
_CLOSE = 1e-10
_ROUNDS = 200

Flags = NDArray[np.bool_]


def run_together(
    work: Work, events: Integers, queues: Sequence[tuple[int, int]]
) -> tuple[Floats, Floats]:
    """Begin and end of every event of many alike steps, from each step's begin on.

    Parameters
    ----------
    work
        What the events need.
    events
        int64 ``(steps, events of a step)``: event numbers, the queues' side by side; every column
        is of one kind.
    queues
        First and one past the last column of every queue.
    """
    starts, ends = np.zeros(events.shape), np.zeros(events.shape)
    if len(queues) == 1:
        lengths = work.setup_s[events] + work.alone_s[events]
        ends = np.cumsum(lengths, axis=1)
        starts[:, 1:] = ends[:, :-1]
        return starts, ends
    state = _State.begin(work, events, queues)
    while len(state.step):
        state.advance(work)
        state.finish(work, starts, ends)
        state.drop_finished()
    return starts, ends


@dataclass(slots=True)
class _State:
    """Where each step and queue is; arrays are ``(steps,)`` or ``(steps, queues)``."""

    events: Integers
    column_kinds: Integers
    stops: Integers
    step: Integers
    now: Floats
    at: Integers
    begun: Floats
    setup: Floats
    left: Floats
    live: Flags

    @classmethod
    def begin(cls, work: Work, events: Integers, queues: Sequence[tuple[int, int]]) -> _State:
        count = len(events)
        at = np.tile(np.array([first for first, _ in queues]), (count, 1))
        heads = events[:, at[0]]
        return cls(
            events=events,
            column_kinds=work.kind_of[events[0]],
            stops=np.array([stop for _, stop in queues]),
            step=np.arange(count),
            now=np.zeros(count),
            at=at,
            begun=np.zeros(at.shape),
            setup=work.setup_s[heads],
            left=work.alone_s[heads],
            live=np.ones(at.shape, dtype=np.bool_),
        )

    def advance(self, work: Work) -> None:
        """To the next end of a set-up or of a job, in every step."""
        preparing = self.live & (self.setup > 0)
        working = self.live & ~preparing & (self.left > 0)
        speed = self._speeds(work, working)
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.where(working, self.left / speed, np.inf)
        np.copyto(needed, self.setup, where=preparing)
        needed[self.live & ~preparing & ~working] = 0.0  # a job that moves nothing
        wait = needed.min(axis=1)
        self.now += wait
        rest = self.left - wait[:, None] * speed
        self.left = np.where(working, np.where(rest > DUST * self.left, rest, 0.0), self.left)
        rest = self.setup - wait[:, None]
        self.setup = np.where(preparing, np.where(rest > DUST * self.setup, rest, 0.0), self.setup)

    def finish(self, work: Work, starts: Floats, ends: Floats) -> None:
        """Notes the jobs that are over, and begins those behind them."""
        over = self.live & (self.setup == 0) & (self.left == 0)
        for queue in range(over.shape[1]):
            rows = np.flatnonzero(over[:, queue])
            if not len(rows):
                continue
            column = self.at[rows, queue]
            starts[self.step[rows], column] = self.begun[rows, queue]
            ends[self.step[rows], column] = self.now[rows]
            column += 1
            self.at[rows, queue] = column
            more = column < self.stops[queue]
            self.live[rows[~more], queue] = False
            rows, column = rows[more], column[more]
            heads = self.events[self.step[rows], column]
            self.begun[rows, queue] = self.now[rows]
            self.setup[rows, queue] = work.setup_s[heads]
            self.left[rows, queue] = work.alone_s[heads]

    def drop_finished(self) -> None:
        """Forgets steps that are over."""
        keep = self.live.any(axis=1)
        if keep.all():
            return
        for name in ("step", "now", "at", "begun", "setup", "left", "live"):
            setattr(self, name, getattr(self, name)[keep])

    def _speeds(self, work: Work, working: Flags) -> Floats:
        """0 where nothing is at work; one computation for all steps with the same kinds at work."""
        kinds = np.where(working, self.column_kinds[np.minimum(self.at, self.stops - 1)] + 1, 0)
        code = np.zeros(len(kinds), dtype=np.int64)
        base = len(work.resources) + 1
        for queue in range(kinds.shape[1]):
            code = code * base + kinds[:, queue]
        speed = working.astype(np.float64)
        _, first, pattern = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(pattern, kind="stable")
        bounds = np.searchsorted(pattern[order], np.arange(1, len(first)))
        for rows in np.split(order, bounds):
            busy = np.flatnonzero(working[rows[0]])
            if len(busy) < 2:
                continue
            heads = self.events[self.step[rows][:, None], self.at[np.ix_(rows, busy)]]
            speed[np.ix_(rows, busy)] = speeds_together(work, heads)
        return speed


def speeds_together(work: Work, heads: Integers) -> Floats:
    """Speed of events that run at the same time, in many steps.

    Parameters
    ----------
    heads
        int64 ``(steps, events)``: event numbers; every column is of one kind.

    Returns
    -------
    numpy.ndarray
        float64 ``(steps, events)``, as :func:`cxl_offload.sim.sharing.speeds` says.
    """
    kinds = work.kind_of[heads[0]].tolist()
    users: dict[int, list[tuple[int, int]]] = {}
    for event, kind in enumerate(kinds):
        for column, resource in enumerate(work.resources[kind]):
            users.setdefault(resource, []).append((event, column))
    shared = [pairs for pairs in users.values() if len(pairs) > 1]
    found = np.ones(heads.shape)
    if not shared:
        return found
    rows = [work.row_of[heads[:, event]] for event in range(len(kinds))]
    shares = np.array(
        [
            work.shares[kinds[event]][rows[event], column]
            for pairs in shared
            for event, column in pairs
        ]
    )
    owner = np.array([event for pairs in shared for event, _ in pairs])
    bounds = np.cumsum([0, *map(len, shared)]).tolist()
    groups = list(pairwise(bounds))
    used = np.array([shares[begin:end].sum(axis=0) for begin, end in groups])
    contended = np.flatnonzero((used > 1.0 + _EPSILON).any(axis=0))
    if len(contended):
        found[contended] = _agree(shares[:, contended], owner, groups, len(kinds))
    return found


def _agree(
    shares: Floats, owner: Integers, groups: Sequence[tuple[int, int]], events: int
) -> Floats:
    """As in sharing, for ``(pairs of resource and user, steps)``; steps that agree are done."""
    result = np.ones((shares.shape[1], events))
    todo = np.arange(shares.shape[1])
    allowed = np.ones(shares.shape)
    others = [
        np.flatnonzero((owner == owner[pair]) & (np.arange(len(owner)) != pair))
        for pair in range(len(owner))
    ]
    for _ in range(_ROUNDS):
        change = np.zeros(len(todo))
        for begin, end in groups:
            held = np.array(
                [allowed[others[pair]].min(axis=0, initial=1.0) for pair in range(begin, end)]
            )
            level = _water_levels(shares[begin:end] * held)
            with np.errstate(divide="ignore", invalid="ignore"):
                speed = np.minimum(1.0, level / shares[begin:end])
            speed[shares[begin:end] == 0.0] = 1.0
            np.maximum(change, np.abs(speed - allowed[begin:end]).max(axis=0), out=change)
            allowed[begin:end] = speed
        moving = change >= _CLOSE
        if not moving.all():
            result[todo[~moving]] = _slowest(allowed[:, ~moving], owner, events)
            todo, shares, allowed = todo[moving], shares[:, moving], allowed[:, moving]
        if not len(todo):
            return result
    result[todo] = _slowest(allowed, owner, events)
    return result


def _slowest(allowed: Floats, owner: Integers, events: int) -> Floats:
    result = np.ones((allowed.shape[1], events))
    for pair, event in enumerate(owner.tolist()):
        np.minimum(result[:, event], allowed[pair], out=result[:, event])
    return result


def _water_levels(asked: Floats) -> Floats:
    """Column by column, the share that bounds those who ask for more."""
    users = len(asked)
    level = np.full(asked.shape[1], np.inf)
    room = np.ones(asked.shape[1])
    for at, amount in enumerate(np.sort(asked, axis=0)):
        left = users - at
        bound = np.isinf(level) & (amount * left >= room)
        level[bound] = room[bound] / left
        room -= amount
    return level
