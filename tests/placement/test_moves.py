"""Live allocations that move: address, views and contents stay, every page arrives."""

from __future__ import annotations

import os

import pytest

from cxl_offload.memory import Bind, Weighted
from cxl_offload.memory.session import Pages
from tests.placement.child import MIB
from tests.placement.kernel_calls import PAGE
from tests.placement.rig import HUGE, Rig
from tests.placement.test_policies import expected_nodes


def test_views_of_a_moved_allocation_keep_their_contents(rig: Rig) -> None:
    np = pytest.importorskip("numpy")
    block = rig.session.allocate(2 * MIB, Bind((0,)))
    address = block.address
    whole = np.from_dlpack(block).view(np.uint32)
    whole[:] = np.arange(whole.size, dtype=np.uint32)
    column = whole.reshape(-1, 1024)[:, 7]
    for node in [*rig.nodes, *reversed(rig.nodes)]:
        rig.session.move(block, Bind((node,)))
        assert set(rig.page_nodes(address, block.nbytes)) == {node}
        assert (block.address, whole.ctypes.data) == (address, address)
        assert (whole == np.arange(whole.size, dtype=np.uint32)).all()
        assert (column == np.arange(7, whole.size, 1024)).all()
        column += 0
        assert rig.session.stats().nodes[node].current_bytes == block.nbytes
    del block
    assert int(column[1]) == 1031, "a view keeps the memory alive"
    assert rig.session.find(address) is not None


def test_moved_stripe_is_exact(rig: Rig) -> None:
    first, last = rig.nodes[0], rig.nodes[-1]
    weights = {first: 1} if first == last else {last: 3, first: 1}
    policy = Weighted(weights, granule_bytes=16 * PAGE)
    block = rig.session.allocate(MIB, Bind((first,)))
    rig.session.move(block, policy)
    assert rig.page_nodes(block.address, MIB) == expected_nodes(policy, MIB)
    assert sum(block.bytes_per_node().values()) == MIB
    del block
    again = rig.session.allocate(MIB, Bind((first,)))
    assert set(rig.page_nodes(again.address, MIB)) == {first}, "the old rule's pool gave it out"


@pytest.mark.parametrize("pages", ["base", "thp"])
def test_moving_a_block_leaves_its_neighbours_alone(rig: Rig, pages: Pages) -> None:
    """Cut from one region, blocks would take their neighbours along if they shared huge pages."""
    home, target = Bind((rig.nodes[0],)), Bind((rig.nodes[-1],))
    rig.session.allocate(8 * HUGE, home, pages=pages)  # dropped at once, and cut up by what follows
    sizes = (MIB, 3 * MIB, PAGE, MIB + PAGE, HUGE)
    blocks = [rig.session.allocate(nbytes, home, pages=pages) for nbytes in sizes]
    for count in range(1, len(blocks) + 1):
        rig.session.move(blocks[count - 1], target)
        found = [set(rig.page_nodes(block.address, block.held_bytes)) for block in blocks]
        expected = [target] * count + [home] * (len(blocks) - count)
        assert found == [set(policy.nodes) for policy in expected]
        if home != target:
            moved = sum(block.held_bytes for block in blocks[:count])
            assert rig.session.stats().nodes[target.nodes[0]].current_bytes == moved


def test_pages_shared_with_a_forked_child_are_named_and_move_after_it(rig: Rig) -> None:
    if rig.session.is_simulated or len(rig.nodes) < 2:
        pytest.skip("the kernel must have two nodes of its own")
    home, target = rig.nodes[0], rig.nodes[-1]
    block = rig.session.allocate(2 * MIB, Bind((home,)))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        with pytest.raises(PermissionError, match="a forked child has them as well"):
            rig.session.move(block, Bind((target,)))
        assert set(rig.page_nodes(block.address, block.nbytes)) == {home}
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
    rig.session.move(block, Bind((target,)))
    assert set(rig.page_nodes(block.address, block.nbytes)) == {target}
