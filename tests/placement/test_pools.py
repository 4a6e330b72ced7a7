"""Huge-page pools that are empty, short, or taken by somebody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxl_offload.memory import Bind, Interleave, Preferred
from tests.placement.kernel_calls import PAGE
from tests.placement.rig import HUGE, Rig


@pytest.fixture(autouse=True)
def pools_are_given_back(our_rig: Rig) -> Iterator[None]:
    yield
    our_rig.session.trim()
    for node in our_rig.nodes:
        our_rig.set_pool(node, 0)


def test_empty_pool_is_named(our_rig: Rig) -> None:
    node = our_rig.nodes[-1]
    with pytest.raises(MemoryError, match=f"pool of node {node}|huge-page pool is too small"):
        our_rig.session.allocate(HUGE, Bind((node,)), pages="2MiB")
    assert our_rig.session.stats().mapped_bytes.current == 0


def test_short_pool_keeps_its_pages(our_rig: Rig) -> None:
    first, last = our_rig.nodes[0], our_rig.nodes[-1]
    our_rig.set_pool(first, 4)
    our_rig.set_pool(last, 2)
    with pytest.raises(MemoryError, match=f"node {last}"):
        our_rig.session.allocate(3 * HUGE, Bind((last,)), pages="2MiB")
    assert our_rig.free_in_pool(last) == 2
    with pytest.raises(MemoryError, match=f"node {last}"):
        our_rig.session.allocate(6 * HUGE, Interleave((first, last)), pages="2MiB")
    assert (our_rig.free_in_pool(first), our_rig.free_in_pool(last)) == (4, 2)
    assert our_rig.session.stats().mapped_bytes.current == 0
    block = our_rig.session.allocate(2 * HUGE, Bind((last,)), pages="2MiB")
    assert set(our_rig.page_nodes(block.address, 2 * HUGE)) == {last}
    assert our_rig.free_in_pool(last) == 0


def test_preferred_pool_spills_into_the_next(our_rig: Rig) -> None:
    first, last = our_rig.nodes[0], our_rig.nodes[-1]
    our_rig.set_pool(last, 1)
    our_rig.set_pool(first, 2)
    block = our_rig.session.allocate(3 * HUGE, Preferred((last, first)), pages="2MiB")
    pages = HUGE // PAGE
    nodes = our_rig.page_nodes(block.address, 3 * HUGE)
    assert nodes == [last] * pages + [first] * 2 * pages


def test_pool_that_shrinks_between_two_calls(our_rig: Rig) -> None:
    node = our_rig.nodes[-1]
    our_rig.set_pool(node, 4)
    block = our_rig.session.allocate(2 * HUGE, Bind((node,)), pages="2MiB")
    our_rig.set_pool(node, 3)
    with pytest.raises(MemoryError, match=f"node {node}"):
        our_rig.session.allocate(2 * HUGE, Bind((node,)), pages="2MiB")
    assert our_rig.free_in_pool(node) == 1
    assert set(our_rig.page_nodes(block.address, 2 * HUGE)) == {node}
