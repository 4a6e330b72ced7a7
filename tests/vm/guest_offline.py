"""Inside a machine with real CXL memory: its node goes offline while a pool lies there.

An administrator, or a daemon that saw too many errors, takes blocks of memory out of use. The
kernel moves what lies there elsewhere, without a word to whom it belongs.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from cxl_offload import discover
from cxl_offload.memory import Bind, Session
from tests.placement.kernel_calls import PAGE, page_nodes
from tests.vm.guest_dax import NODES, take_offline
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
FAR = SPEC.node_ids[-1]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _node_comes_back() -> Iterator[None]:
    yield
    for state in sorted((NODES / f"node{FAR}").glob("memory*/state")):
        if state.read_text().strip() == "offline":
            state.write_text("online_movable")


def test_pages_of_a_node_that_goes_offline_are_whole_and_reported() -> None:
    session = Session.linux()
    block = session.allocate(4 * MIB, Bind((FAR,)))
    contents = os.urandom(4 * MIB)
    ctypes.memmove(block.address, contents, len(contents))
    take_offline(FAR)
    assert not discover().node(FAR).has_memory
    assert Counter(page_nodes(block.address, 4 * MIB)) == {0: 4 * MIB // PAGE}
    for bring_back in (False, True):
        found = session.check(bring_back=bring_back)
        assert found.lost == ()
        assert sum(each.nbytes for each in found.strays) == 4 * MIB
        assert {(each.placed_on, each.found_on) for each in found.strays} == {(FAR, 0)}
        assert not any(each.is_back for each in found.strays)
    assert ctypes.string_at(block.address, 4 * MIB) == contents


def test_new_tensors_of_a_node_that_is_offline_are_one_error_and_the_node_comes_back() -> None:
    session = Session.linux()
    block = session.allocate(MIB, Bind((FAR,)))
    ctypes.memset(block.address, 7, MIB)
    take_offline(FAR)
    with pytest.raises((MemoryError, ValueError), match=f"node {FAR}") as caught:
        session.allocate(32 * MIB, Bind((FAR,)))
    assert "\n" not in str(caught.value)
    for state in sorted((NODES / f"node{FAR}").glob("memory*/state")):
        state.write_text("online_movable")
    found = session.check()
    assert [each.is_back for each in found.strays] == [True] * len(found.strays) != []
    assert Counter(page_nodes(block.address, MIB)) == {FAR: MIB // PAGE}
    assert ctypes.string_at(block.address, MIB) == b"\7" * MIB
