"""A session on simulated nodes driven at random and compared with a simple model.

The model knows only what callers can know: which blocks are live, what was written to them, and
what others hold on the nodes. From that it says what must fit and what cannot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cxl_offload import _C
from cxl_offload.memory import Bind, FirstTouch, Interleave, Pages, Policy, Preferred, Weighted

from .ground import (
    KIB,
    MIB,
    NODES,
    PAGE,
    check_against_kernel,
    check_all_returned,
    kernel_of,
    simulated,
)

NODE_BYTES = 64 * MIB
POOL_PAGES = 8
CAPACITY_BYTES = 40 * MIB  # of node 2, set by the user
RESERVE_BYTES = 16 * MIB  # the least that is kept on a node

SIZES = st.one_of(
    st.integers(1, 8 * KIB), st.integers(8 * KIB, MIB), st.integers(1, 12).map(lambda n: n * MIB)
)
GRANULES = st.sampled_from([64 * KIB, 2 * MIB])
POLICIES: st.SearchStrategy[Policy] = st.one_of(
    st.sampled_from(NODES).map(lambda node: Bind((node,))),
    st.permutations(NODES).map(lambda order: Bind(tuple(order[:2]))),
    st.permutations(NODES).map(lambda order: Preferred(tuple(order[:2]))),
    st.builds(
        lambda order, granule: Interleave(tuple(order[:2]), granule_bytes=granule),
        st.permutations(NODES),
        GRANULES,
    ),
    st.builds(
        lambda weights, granule: Weighted(weights, granule_bytes=granule),
        st.dictionaries(st.sampled_from(NODES), st.integers(1, 5), min_size=2),
        GRANULES,
    ),
)
CHOICE = st.integers(0, 1000)  # an index, not a block: hypothesis keeps what it drew
PAGES: st.SearchStrategy[Pages] = st.sampled_from(("base", "base", "thp", "2MiB"))


@dataclass
class Live:
    """A block or what is left of it: views, through which it can still be read."""

    block: _C.Allocation | None
    view: np.ndarray[Any, np.dtype[np.uint8]]
    value: int
    places: Counter[int]
    held_bytes: int
    pages: Pages

    def check_contents(self) -> None:
        assert self.view[0] == self.value
        assert self.view[-1] == self.value
        assert self.view[len(self.view) // 2] == self.value


def page_bytes(pages: Pages) -> int:
    return 2 * MIB if pages == "2MiB" else PAGE


def unit_bytes(pages: Pages) -> int:
    """What a node holds whole ones of: the kernel makes huge pages of a node's own memory only."""
    return 2 * MIB if pages in ("thp", "2MiB") else PAGE


def has_odd_granule(policy: Policy, pages: Pages) -> bool:
    """Whether the granule is no multiple of the unit, which is refused."""
    odd = isinstance(policy, Interleave | Weighted) and policy.granule_bytes % unit_bytes(pages)
    return bool(odd)


class RandomSession(RuleBasedStateMachine):
    """Allocates, moves, views, frees and trims while others take and leave the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.session = simulated(NODE_BYTES, huge_2mib=POOL_PAGES, limits={2: CAPACITY_BYTES})
        self.kernel = kernel_of(self.session)
        self.others = dict.fromkeys(NODES, 0)
        self.live: list[Live] = []
        self.written = 0

    @initialize(nbytes=st.integers(0, 20).map(lambda n: n * MIB), node=st.sampled_from(NODES))
    def begin(self, nbytes: int, node: int) -> None:
        self.take(node, nbytes)

    def slab_bytes(self) -> int:
        """The most that small blocks keep from others: each may have a slab to itself."""
        small = [live for live in self.live if live.held_bytes < page_bytes(live.pages)]
        return sum(max(64 * KIB, page_bytes(live.pages)) for live in small)

    def room(self, node: int, pages: str) -> int:
        """Bytes that a new block may take there, all caches given back."""
        huge = pages == "2MiB"
        held = {True: 0, False: 0}
        for live in self.live:
            share = live.places[node] * live.held_bytes // max(1, sum(live.places.values()))
            held[live.pages == "2MiB"] += share
        total = POOL_PAGES * 2 * MIB if huge else NODE_BYTES - RESERVE_BYTES - self.others[node]
        room = total - held[huge]
        if node == 2:
            room = min(room, CAPACITY_BYTES - sum(held.values()))
        return room

    @rule(nbytes=SIZES, policy=POLICIES, pages=PAGES)
    def allocate(self, nbytes: int, policy: Policy, pages: Pages) -> None:
        if has_odd_granule(policy, pages):
            return
        try:
            block = self.session.allocate(nbytes, policy, pages=pages)
        except MemoryError:
            self.check_refusal(policy, nbytes, pages)
            return
        self.written = self.written % 250 + 1
        view = np.from_dlpack(block)  # type: ignore[arg-type]
        view[0] = view[len(view) // 2] = view[-1] = self.written
        places = Counter(block.bytes_per_node())
        live = Live(block, view, self.written, places, block.held_bytes, pages)
        self.check_places(live, policy)
        self.live.append(live)

    def check_refusal(self, policy: Policy, nbytes: int, pages: Pages) -> None:
        unit = unit_bytes(pages)
        need = -(-nbytes // unit) * unit
        slack = 2 * page_bytes(pages) + self.slab_bytes()
        rooms = {n: max(0, self.room(n, pages) - slack) // unit * unit for n in NODES}
        match policy:
            case Bind(nodes):
                room = sum(rooms[node] for node in nodes)
            case Preferred():
                room = sum(rooms.values())
            case _:  # some node of the stripe must lack room for the largest share it can have
                nodes = policy.nodes if isinstance(policy, Interleave) else tuple(policy.weights)
                room = min(rooms[node] for node in nodes)
        assert need > room, f"{need} bytes of {room} were refused"

    def check_places(self, live: Live, policy: Policy) -> None:
        assert sum(live.places.values()) == len(live.view)
        if isinstance(policy, Bind):
            assert set(live.places) <= set(policy.nodes)
        if isinstance(policy, Interleave | Weighted):
            listed = policy.nodes if isinstance(policy, Interleave) else tuple(policy.weights)
            assert set(live.places) <= set(listed)

    @precondition(lambda self: any(live.block for live in self.live))
    @rule(choice=CHOICE, policy=POLICIES)
    def move(self, choice: int, policy: Policy) -> None:
        movable = [live for live in self.live if live.block]
        live = movable[choice % len(movable)]
        assert live.block is not None
        before = live.block.bytes_per_node()
        try:
            self.session.move(live.block, policy)
        except MemoryError:
            assert live.block.bytes_per_node() == before
        except ValueError:
            assert live.held_bytes < page_bytes(live.pages) or has_odd_granule(policy, live.pages)
            assert live.block.bytes_per_node() == before
        else:
            live.places = Counter(live.block.bytes_per_node())
            self.check_places(live, policy)
        live.check_contents()

    @precondition(lambda self: self.live)
    @rule(choice=CHOICE)
    def read_and_drop(self, choice: int) -> None:
        self.live.pop(choice % len(self.live)).check_contents()

    @precondition(lambda self: any(live.block for live in self.live))
    @rule(choice=CHOICE)
    def keep_only_a_view(self, choice: int) -> None:
        owned = [live for live in self.live if live.block]
        live = owned[choice % len(owned)]
        live.block = None
        live.check_contents()

    @rule(node=st.sampled_from(NODES), nbytes=st.integers(0, 56).map(lambda n: n * MIB))
    def take(self, node: int, nbytes: int) -> None:
        """Others hold so much of the node from now on, if there is room for them."""
        try:
            self.kernel.set_used_by_others(node, nbytes)
        except ValueError:
            assert nbytes + self.kernel.used_bytes(node) > NODE_BYTES
            return
        self.others[node] = nbytes

    @rule()
    def touch_for_the_first_time(self) -> None:
        block = self.session.allocate(MIB, FirstTouch())
        assert block.bytes_per_node() == {-1: MIB}

    @rule()
    def trim(self) -> None:
        cached = self.session.stats().cached_bytes.current
        assert self.session.trim() <= cached
        assert self.session.stats().cached_bytes.current <= self.slab_bytes()

    def drop_all(self) -> None:
        while self.live:
            self.live.pop().check_contents()
        check_all_returned(self.session)

    @precondition(lambda self: len(self.live) > 4)
    @rule()
    def clear(self) -> None:
        self.drop_all()

    @invariant()
    def accounts_are_true(self) -> None:
        blocks = [live.block for live in self.live if live.block]
        check_against_kernel(self.session, blocks)
        stats = self.session.stats()
        assert stats.allocations.current == len(self.live)
        assert stats.asked_bytes.current == sum(len(live.view) for live in self.live)
        assert self.kernel.used_bytes(2) <= CAPACITY_BYTES
        for node in NODES:
            limit = NODE_BYTES + POOL_PAGES * 2 * MIB - self.others[node]
            assert self.kernel.used_bytes(node) <= limit

    def teardown(self) -> None:
        self.drop_all()
