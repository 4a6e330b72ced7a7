"""Keeps parts of tensors that are asked for often near, and the others far. Pages move in place.

A part is what a program asks for as a whole: an expert of a layer, which is a slice of each of its
weights, or a block of rows of an embedding. There is no second copy. A part is on one tier or on
the other, and its address stays.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from cxl_offload.memory import Allocation, Bind, Session
from cxl_offload.memory.bounds import check_number, check_size
from cxl_offload.renamed import renamed_attribute
from cxl_offload.tune.counts import Outcome, count_decision
from cxl_offload.tune.gate import Gate, one_at_a_time
from cxl_offload.tune.homes import REFUSALS
from cxl_offload.tune.most_used import MostUsedItems, MostUsedRule, Swap
from cxl_offload.tune.tiers import check_tiers

_LOG = logging.getLogger("cxl_offload.tune")

_TUNER = "hot"
"""The label of these decisions in the metrics and in reports, which dashboards ask for."""

_REST_ROUNDS = 256
"""Rounds without moves after a node was full, so that it is not asked after every step."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some bytes of memory of a session."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Pages:
    """Whole pages of one allocation."""

    owner: Allocation
    offset: int
    nbytes: int


def _check_apart(parts: Mapping[str, Sequence[Slice]]) -> None:
    """Refuses slices that are empty or overlap: a page would be on two tiers at once."""
    slices = sorted((one.address, one.nbytes, name) for name, part in parts.items() for one in part)
    end, last = 0, ""
    for address, nbytes, name in slices:
        check_size(nbytes, f"a slice of part {name!r}, in bytes,")
        if address < end:
            raise ValueError(f"parts {last!r} and {name!r} overlap")
        end, last = address + nbytes, name


class MostUsedParts:
    """Keeps the parts that are asked for most on the near tier, as far as its room goes.

    Parameters
    ----------
    parts
        Name to the slices that a part is made of. All parts have the same bytes. Pages that two
        parts share stay where they are.
    near, far
        Nodes of the two tiers.
    room_bytes
        Room of the near tier for these parts.
    session
        The session that the slices are in.
    budget_bytes_per_round
        Bytes that may move in a round, in the mean; 0 only counts and advises.
    rule
        When a part moves.
    framework
        For the counts of decisions.

    Attributes
    ----------
    most_used
        Counts the uses and chooses.
    part_bytes
        Bytes of each part.
    asked_bytes, near_bytes, moved_bytes
        Since the beginning: bytes that were asked for, those of them that were near at that time,
        and bytes that have moved.

    Raises
    ------
    ValueError
        No part, parts of different sizes or that overlap, memory of others, or parts without a
        whole page.
    """

    hot = renamed_attribute("hot", "most_used")

    def __init__(
        self,
        parts: Mapping[str, Sequence[Slice]],
        *,
        near: Sequence[int],
        far: Sequence[int],
        room_bytes: int,
        session: Session,
        budget_bytes_per_round: int = 0,
        rule: MostUsedRule = MostUsedRule(),  # noqa: B008 - frozen
        framework: str = "script",
    ) -> None:
        check_number(room_bytes, "room_bytes")
        check_number(budget_bytes_per_round, "the budget in bytes a round")
        _check_apart(parts)
        sizes = {sum(one.nbytes for one in part) for part in parts.values()}
        if len(sizes) != 1:
            raise ValueError(f"parts of {sorted(sizes)} bytes: need some, all of one size")
        (self.part_bytes,) = sizes
        check_tiers(near, far)
        self._gate = Gate()
        self._session = session
        self._near, self._far = Bind(tuple(near)), Bind(tuple(far))
        self._names = tuple(parts)
        self._pages = [self._whole_pages(name, part) for name, part in parts.items()]
        room = int(min(room_bytes, len(parts) * self.part_bytes)) // self.part_bytes
        here = self.granted()
        self._surplus = list(here[room:])
        self.most_used = MostUsedItems(len(parts), room, near=here[:room], rule=rule)
        self._budget = budget_bytes_per_round
        self._traffic = rule.traffic
        self._framework = framework
        self._credit = 0.0  # of the budget
        self._earned = 0.0  # of the traffic
        self._rest = 0
        self._advised: Swap | None = None
        self.asked_bytes = self.near_bytes = self.moved_bytes = 0

    def _whole_pages(self, name: str, part: Sequence[Slice]) -> tuple[_Pages, ...]:
        found = []
        for one in part:
            owner = self._session.find(one.address)
            if owner is None or one.address + one.nbytes > owner.address + owner.nbytes:
                raise ValueError(f"part {name!r} is not in memory of this session")
            unit = owner.unit_bytes
            begin = one.address - owner.address
            end = begin + one.nbytes
            first = -(-begin // unit) * unit
            last = end if end == owner.nbytes else end // unit * unit
            if last > first:
                found.append(_Pages(owner, first, last - first))
        if not found:
            raise ValueError(
                f"part {name!r} of {self.part_bytes} bytes has no whole page to itself"
            )
        return tuple(found)

    def _is_near(self, number: int) -> bool:
        near = there = 0
        for one in self._pages[number]:
            address = one.owner.address + one.offset
            found = self._session.bytes_per_node(address, one.nbytes)
            near += sum(found.get(node, 0) for node in self._near.nodes)
            there += sum(found.values())
        return 2 * near > there

    def _was_put_near(self, number: int) -> bool:
        """The same from the books of the session, because the kernel may refuse to answer."""
        near = sum(
            nbytes
            for one in self._pages[number]
            for _, nbytes, node in one.owner.runs(one.offset, one.nbytes)
            if node in self._near.nodes
        )
        return 2 * near > sum(one.nbytes for one in self._pages[number])

    def granted(self) -> tuple[int, ...]:
        """Parts that are near now, asked from their pages."""
        return tuple(number for number in range(len(self._pages)) if self._is_near(number))

    @one_at_a_time
    def round(self, uses: ArrayLike) -> None:
        """Ends a round: counts what was asked for, then moves what is worth moving.

        No work may use the parts while this runs.

        Parameters
        ----------
        uses
            int or float ``(parts,)``: how often each part was read.
        """
        counts = np.asarray(uses, dtype=np.float64)
        self.most_used.note(counts)
        asked = int(counts.sum() * self.part_bytes)
        self.asked_bytes += asked
        self.near_bytes += int(counts[list(self.most_used.near)].sum() * self.part_bytes)
        self._earned += asked * self._traffic
        if self._rest:
            self._rest -= 1
        elif self._budget:
            most = 2.0 * max(self._budget, self._swap_bytes)
            self._credit = min(self._credit + self._budget, most)
            self._advance()
        else:
            self._advise()

    @property
    def _swap_bytes(self) -> int:
        return 2 * self.part_bytes

    def _may_move(self) -> bool:
        return min(self._credit, self._earned) >= self._swap_bytes and not self._rest

    def _advance(self) -> None:
        while self._surplus and self._may_move():
            with self._accounted():
                self._move(self._surplus.pop(), self._far)
        while self._may_move():
            found = self.most_used.swaps(most=1)
            if not found:
                return
            with self._accounted():
                self._carry_out(found[0])

    @contextlib.contextmanager
    def _accounted(self) -> Iterator[None]:
        """Counts the bytes that move inside of the block. After a full node, moves rest for a
        while."""
        before = self.moved_bytes
        outcome: Outcome = "moved"
        try:
            yield
        except REFUSALS as reason:
            outcome = "refused"
            self._rest = _REST_ROUNDS
            _LOG.warning("tune: parts stay where they are: %s", str(reason))
        moved = self.moved_bytes - before
        self._credit -= moved
        self._earned -= moved
        count_decision(self._framework, _TUNER, outcome, nbytes=moved)

    def _carry_out(self, swap: Swap) -> None:
        """Moves one part near, after another part has made room for it. Raises as
        :meth:`Session.move`."""
        try:
            if swap.far >= 0:
                self._move(swap.far, self._far)
            self._move(swap.near, self._near)
        except REFUSALS:
            self.most_used.undo(swap)
            if swap.far >= 0 and not self._was_put_near(swap.far):
                self.most_used.leave(swap.far)
            raise
        _LOG.info(
            "tune: %s is near now%s",
            self._names[swap.near],
            "" if swap.far < 0 else f", asked for more often than {self._names[swap.far]}",
        )

    def _move(self, number: int, policy: Bind) -> None:
        """Moves a part. If a node has no room for all of it, the whole part goes back."""
        back = self._far if policy is self._near else self._near
        done: list[_Pages] = []
        try:
            for one in self._pages[number]:
                self._move_pages(one, policy)
                done.append(one)
        except REFUSALS:
            for one in done:
                self._move_pages(one, back)
            raise

    def _move_pages(self, one: _Pages, policy: Bind) -> None:
        self._session.move_part(one.owner, policy, offset=one.offset, nbytes=one.nbytes)
        self.moved_bytes += one.nbytes

    def _advise(self) -> None:
        found = self.most_used.swaps(most=1)
        if not found:
            return
        self.most_used.undo(found[0])
        if found[0] != self._advised:
            self._advised = found[0]
            count_decision(self._framework, _TUNER, "advised")
            _LOG.info(
                "tune, advice only: %s is asked for more often than what is near; give a budget to "
                "have it moved",
                self._names[found[0].near],
            )
