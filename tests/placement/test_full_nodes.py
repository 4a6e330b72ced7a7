"""Nodes that others have filled: an error that names the node, nobody killed, no page lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
from itertools import groupby

import pytest

from cxl_offload.memory import Bind, Interleave, Pages, Preferred, Weighted
from tests.placement.child import MIB, stranger_filling_meanwhile
from tests.placement.kernel_calls import PAGE, oom_kills
from tests.placement.rig import MACHINE_UNDER_TEST, Rig

LEFT = 96 * MIB + 5 * PAGE  # no multiple of a huge page
# What the kernel may take on a node for itself meanwhile: page tables, per-CPU lists, caches.
NOISE = 24 * MIB


@pytest.fixture(autouse=True)
def nobody_killed(our_rig: Rig) -> object:
    before = None if our_rig.session.is_simulated else oom_kills()
    yield
    assert our_rig.session.is_simulated or oom_kills() == before, "the kernel killed a process"


def _last(rig: Rig) -> int:
    return rig.nodes[-1]


def _nearest(rig: Rig, node: int) -> list[int]:
    others = [other for other in rig.nodes if other != node]
    return sorted(others, key=lambda other: (rig.distances[node][other], other))


def _runs(nodes: list[int]) -> list[int]:
    return [node for node, _ in groupby(nodes)]


def test_bind_to_a_node_without_room_is_refused_before_a_page_is_taken(our_rig: Rig) -> None:
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        before = our_rig.free_bytes(node)
        with pytest.raises(MemoryError, match=rf"node {node} has .* free"):
            our_rig.session.allocate(before + MIB, Bind((node,)))
        assert abs(our_rig.free_bytes(node) - before) < NOISE
        assert our_rig.session.stats().mapped_bytes.current == 0
        small = our_rig.session.allocate(LEFT // 4, Bind((node,)))
        assert set(our_rig.page_nodes(small.address, small.nbytes)) == {node}


def test_the_reserve_of_a_node_is_left_alone(our_rig: Rig) -> None:
    """Asking for all that is free is refused too: the kernel needs some to live on."""
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        with pytest.raises(MemoryError, match="reserve"):
            our_rig.session.allocate(our_rig.free_bytes(node) // PAGE * PAGE, Bind((node,)))
        assert our_rig.session.stats().mapped_bytes.current == 0


def test_strict_interleave_over_a_full_node_is_refused(our_rig: Rig) -> None:
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        nbytes = 4 * (our_rig.free_bytes(node) + MIB)
        with pytest.raises(MemoryError, match=rf"node {node} needs"):
            our_rig.session.allocate(nbytes, Weighted({0: 3, node: 1}))
        assert our_rig.session.stats().mapped_bytes.current == 0


def test_lenient_interleave_reports_where_every_byte_went(our_rig: Rig) -> None:
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        nbytes = (2 * our_rig.free_bytes(node) + 32 * MIB) // PAGE * PAGE
        block = our_rig.session.allocate(nbytes, Interleave((0, node)), strict=False)
        pages = our_rig.page_nodes(block.address, nbytes)
        assert block.bytes_per_node() == {n: pages.count(n) * PAGE for n in set(pages)}
        assert 0 < pages.count(node) < len(pages) // 2
        assert block.notes
        uses = our_rig.session.stats().nodes
        assert all(uses[n].current_bytes == pages.count(n) * PAGE for n in set(pages))


def _assert_accounts_follow(rig: Rig, nodes: list[int]) -> None:
    """Of the only block, whose pages are on these nodes."""
    held = {node: use.current_bytes for node, use in rig.session.stats().nodes.items()}
    assert {node: count for node, count in held.items() if count} == {
        node: nodes.count(node) * PAGE for node in set(nodes)
    }


@pytest.mark.parametrize("pages", ["base", "thp"])
def test_preferred_spills_to_the_nearest_node_and_says_so(our_rig: Rig, pages: Pages) -> None:
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        nbytes = (our_rig.free_bytes(node) + 32 * MIB) // PAGE * PAGE
        block = our_rig.session.allocate(nbytes, Preferred((node,)), pages=pages)
        nearest = _nearest(our_rig, node)[0]
        nodes = our_rig.page_nodes(block.address, block.held_bytes)
        assert _runs(nodes) == [node, nearest]
        assert any(f"node {nearest}" in note for note in block.notes)
        assert block.bytes_per_node().keys() == {node, nearest}
        _assert_accounts_follow(our_rig, nodes)


@pytest.mark.parametrize("pages", ["base", "thp"])
def test_spill_order_of_the_caller_comes_before_distance(our_rig: Rig, pages: Pages) -> None:
    node = _last(our_rig)
    farthest = _nearest(our_rig, node)[-1]
    with our_rig.filled(node, leave_bytes=LEFT):
        nbytes = (our_rig.free_bytes(node) + 32 * MIB) // PAGE * PAGE
        for policy in (Preferred((node, farthest)), Bind((node, farthest))):
            block = our_rig.session.allocate(nbytes, policy, pages=pages)
            nodes = our_rig.page_nodes(block.address, block.held_bytes)
            assert _runs(nodes) == [node, farthest]
            assert not block.notes, "both nodes were asked for"
            _assert_accounts_follow(our_rig, nodes)
            del block
            our_rig.session.trim()


def test_when_every_node_is_full_the_call_is_refused_before_a_page_is_taken(our_rig: Rig) -> None:
    """The kernel would have to kill somebody, whatever the policy."""
    with contextlib.ExitStack() as others:
        for node in our_rig.nodes:
            others.enter_context(our_rig.filled(node, leave_bytes=LEFT))
        nbytes = sum(our_rig.free_bytes(node) for node in our_rig.nodes) // PAGE * PAGE
        for policy in (Preferred(our_rig.nodes), Bind(our_rig.nodes), Interleave(our_rig.nodes)):
            with pytest.raises(MemoryError):
                our_rig.session.allocate(nbytes, policy, strict=False)
        mapped = our_rig.session.stats().mapped_bytes
        assert (mapped.current, mapped.total) == (0, 0), "it began before it was refused"


def test_move_to_a_full_node_leaves_pages_and_contents(our_rig: Rig) -> None:
    node = _last(our_rig)
    with our_rig.filled(node, leave_bytes=LEFT):
        nbytes = (our_rig.free_bytes(node) + 16 * MIB) // PAGE * PAGE
        block = our_rig.session.allocate(nbytes, Bind((0,)))
        content = os.urandom(MIB)
        ctypes.memmove(block.address + nbytes - MIB, content, MIB)
        with pytest.raises(MemoryError, match=f"node {node}"):
            our_rig.session.move(block, Bind((node,)))
        assert set(our_rig.page_nodes(block.address, nbytes)) == {0}
        assert ctypes.string_at(block.address + nbytes - MIB, MIB) == content


if MACHINE_UNDER_TEST is not None:

    def test_node_filled_by_another_process_while_we_allocate(our_rig: Rig) -> None:
        """Whoever loses the race gets an error that names the node, or all of its pages."""
        node = _last(our_rig)
        granted = 0
        for share in (0.5, 0.7, 0.9):
            before = our_rig.free_bytes(node)
            nbytes = int(before * share) // PAGE * PAGE
            with stranger_filling_meanwhile(node) as go:
                go()
                refusal = ""
                try:
                    block = our_rig.session.allocate(nbytes, Bind((node,)))
                except MemoryError as error:
                    refusal = str(error)
                else:
                    granted += 1
                    assert set(our_rig.page_nodes(block.address, nbytes)) == {node}
                    del block
                assert not refusal or f"node {node}" in refusal
                our_rig.session.trim()
                assert our_rig.session.stats().mapped_bytes.current == 0
            assert before - our_rig.free_bytes(node) < NOISE, "pages of the node were lost"
        assert granted < 3, "the other process never got in the way"
