"""Keeps the sequences that are used soonest near: KV caches of conversations that take turns.

Every step reads all keys and values of a sequence. So what counts is when a sequence is used again,
and not how often. A sequence in use is used for the rest of its turn. Of those that wait, the one
that was used most recently is expected first, unless the program says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.memory import Bind, Session
from cxl_offload.memory.bounds import check_number
from cxl_offload.tune.counts import count_decision
from cxl_offload.tune.curves import TierRatios
from cxl_offload.tune.gate import Gate, one_at_a_time
from cxl_offload.tune.homes import REFUSALS
from cxl_offload.tune.tiers import check_tiers

_LOG = logging.getLogger("cxl_offload.tune")

_FIRST_TURN = 16.0
"""Steps that a turn is thought to have before one has been seen."""

_REST_STEPS = 256
"""Steps without moves after a node was full."""

Sequences = Mapping[Hashable, tuple[int, ...]]
"""Every sequence that is alive, and the addresses of the allocations that it is made of."""


@dataclass(slots=True)
class _Held:
    """Bytes of a sequence, those of them that are near, and the allocations that were asked."""

    pieces: tuple[int, ...]
    nbytes: int
    near: int


class NextUse:
    """Keeps the sequences that are used soonest on the near tier, as far as its room goes.

    A sequence comes near when it is used, if the rest of its turn is likely to repay the two moves.
    When room is needed, others go far, beginning with the one whose next use is furthest away.

    Parameters
    ----------
    near, far
        Nodes of the two tiers.
    ratios
        The far tier against the near one: what a step saves near, against what moves take.
    room_bytes
        Room of the near tier for sequences.
    session
        The session that they are in.
    budget_bytes_per_step
        Bytes that may move after a step, in the mean; 0 only advises.
    framework
        For the counts of decisions.

    Attributes
    ----------
    moved_bytes
        Since the beginning.
    """

    def __init__(
        self,
        *,
        near: Sequence[int],
        far: Sequence[int],
        ratios: TierRatios,
        room_bytes: int,
        session: Session,
        budget_bytes_per_step: int = 0,
        framework: str = "script",
    ) -> None:
        check_tiers(near, far)
        check_number(room_bytes, "room_bytes")
        check_number(budget_bytes_per_step, "the budget in bytes a step")
        self._gate = Gate()
        self._near, self._far = Bind(tuple(near)), Bind(tuple(far))
        # Two moves at the far tier's rate, over what a step's reads save near.
        saved = 1.0 - ratios.bandwidth
        self._steps_to_repay = 2.0 / saved if saved > 0 else float("inf")
        self._room = room_bytes
        self._session = session
        self._budget = budget_bytes_per_step
        self._framework = framework
        self._credit = 0
        self._rest = 0
        self._turn_steps = _FIRST_TURN
        self._turn: tuple[Hashable, int] | None = None
        self._last_used: dict[Hashable, int] = {}
        self._expected: tuple[Hashable, ...] = ()
        self._steps = 0
        self._advised: Hashable = None
        self._held: dict[Hashable, _Held] = {}
        self.moved_bytes = 0

    def expect(self, names: Iterable[Hashable]) -> None:
        """Sequences in the order of their next use; it holds until each has been used."""
        self._expected = tuple(names)

    def granted(self, sequences: Sequences) -> tuple[Hashable, ...]:
        """Sequences that are near now, most of their bytes at least, asked from their pages."""
        return tuple(name for name, pieces in sequences.items() if self._pages_are_near(pieces))

    @one_at_a_time
    def step(self, used: Hashable, sequences: Sequences) -> None:
        """Ends a step that has used one sequence. Nothing may read a sequence while this runs."""
        self._note(used, sequences)
        if self._rest:
            self._rest -= 1
            return
        if not self._budget:
            self._advise(used)
            return
        self._credit = min(self._credit + self._budget, max(self._room, self._budget))
        try:
            for name in self._come(used):
                self._bring(name)
            self._make_room(0, None)  # sequences grow
        except REFUSALS as reason:
            self._rest = _REST_STEPS
            self._held.clear()  # some of a sequence may have moved
            count_decision(self._framework, "next-use", "refused", reason=str(reason))
            _LOG.warning("tune: sequences stay where they are: %s", str(reason))

    def _note(self, used: Hashable, sequences: Sequences) -> None:
        self._steps += 1
        name, steps = self._turn or (used, 0)
        if name != used:
            self._turn_steps += (steps - self._turn_steps) / 4
            steps = 0
        self._turn = (used, steps + 1)
        self._expected = tuple(one for one in self._expected if one != used)
        known = {one: self._last_used.get(one, 0) for one in sequences}
        self._last_used = {**known, used: self._steps}
        held = {one: self._held.get(one) for one in sequences}
        self._held = {
            one: seen if seen is not None and seen.pieces == sequences[one] else self._ask(pieces)
            for (one, seen), pieces in zip(held.items(), sequences.values(), strict=True)
        }

    def _ask(self, pieces: tuple[int, ...]) -> _Held:
        """Notes where a sequence was put. It does not ask for the pages, because the kernel may
        refuse that."""
        made = _Held(pieces, 0, 0)
        for owner in filter(None, map(self._session.find, pieces)):
            made.nbytes += owner.nbytes
            runs = owner.runs(0, owner.nbytes)
            made.near += sum(nbytes for _, nbytes, node in runs if node in self._near.nodes)
        return made

    def _come(self, used: Hashable) -> Iterator[Hashable]:
        """What should come near: what is in use, and what was said to follow."""
        assert self._turn is not None
        steps = self._turn[1]  # a turn that has lasted long is likely to last as long again
        if max(self._turn_steps - steps, steps) > self._steps_to_repay:
            yield used
        following = self._expected[:1]
        if self._turn_steps > self._steps_to_repay:
            yield from (name for name in following if name in self._held)

    def _order(self) -> list[Hashable]:
        """Sequences by their next use, the soonest first."""
        assert self._turn is not None
        rest = sorted(self._last_used, key=lambda name: -self._last_used[name])
        order = dict.fromkeys([self._turn[0], *self._expected, *rest])
        return [name for name in order if name in self._held]

    def _near_bytes(self) -> int:
        return sum(one.near for one in self._held.values())

    def _bring(self, name: Hashable) -> None:
        one = self._held[name]
        missing = one.nbytes - one.near
        if not missing or one.nbytes > self._room or self._credit < missing:
            return
        if self._make_room(missing, name):
            self._move(name, self._near)

    def _make_room(self, needed: int, comes: Hashable | None) -> bool:
        """Sends sequences far that are used after ``comes``, the latest first. Returns whether
        there is room."""
        order = self._order()
        behind = order[1:] if comes is None else order[order.index(comes) + 1 :]
        for name in reversed(behind):
            if self._near_bytes() + needed <= self._room:
                break
            if self._held[name].near and self._credit >= self._held[name].near + needed:
                self._move(name, self._far)
        return self._near_bytes() + needed <= self._room

    def _move(self, name: Hashable, policy: Bind) -> None:
        one = self._held[name]
        nbytes = one.near if policy is self._far else one.nbytes - one.near
        for owner in filter(None, map(self._session.find, one.pieces)):
            self._session.move(owner, policy)
        one.near = 0 if policy is self._far else one.nbytes
        self._credit -= nbytes
        self.moved_bytes += nbytes
        count_decision(self._framework, "next-use", "moved", nbytes=nbytes)
        where = "far now, used last" if policy is self._far else "near now, used next"
        _LOG.info("tune: sequence %s is %s", name, where)

    def _advise(self, used: Hashable) -> None:
        one = self._held[used]
        is_far = one.near < one.nbytes <= self._room
        if is_far and self._turn_steps > self._steps_to_repay and used != self._advised:
            self._advised = used
            count_decision(self._framework, "next-use", "advised")
            _LOG.info("tune, advice only: sequence %s is in use and far; give a budget", used)

    def _pages_are_near(self, pieces: tuple[int, ...]) -> bool:
        near = there = 0
        for owner in filter(None, map(self._session.find, pieces)):
            found = self._session.bytes_per_node(owner.address, owner.nbytes)
            near += sum(found.get(node, 0) for node in self._near.nodes)
            there += sum(found.values())
        return 2 * near > there
