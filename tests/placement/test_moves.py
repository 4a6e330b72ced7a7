"""Live allocations that move: address, views and contents stay, every page arrives."""

from __future__ import annotations

import os

import pytest

from cxl_offload.memory import Bind, Pages, Weighted
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


def test_parts_move_alone_and_all_of_it_makes_them_one_again(rig: Rig) -> None:
    np = pytest.importorskip("numpy")
    home, target = rig.nodes[0], rig.nodes[-1]
    block = rig.session.allocate(2 * MIB, Bind((home,)))
    whole = np.from_dlpack(block).view(np.uint32)
    whole[:] = np.arange(whole.size, dtype=np.uint32)
    rig.session.move_part(block, Bind((target,)), offset=4 * PAGE, nbytes=8 * PAGE)
    pages = rig.page_nodes(block.address, block.nbytes)
    assert pages == [target if 4 <= at < 12 else home for at in range(len(pages))]
    use = rig.session.stats().nodes
    if home != target:
        assert use[target].current_bytes == 8 * PAGE
        assert use[home].current_bytes == block.nbytes - 8 * PAGE
    rig.session.move_part(block, Bind((target,)), offset=MIB, nbytes=MIB)
    assert set(rig.page_nodes(block.address + MIB, MIB)) == {target}
    assert (whole == np.arange(whole.size, dtype=np.uint32)).all()
    assert block.notes == ["parts of it were moved elsewhere"]
    rig.session.move(block, Bind((home,)))
    assert set(rig.page_nodes(block.address, block.nbytes)) == {home}
    assert block.notes == []
    assert rig.session.stats().nodes[home].current_bytes == block.nbytes


def test_parts_that_are_none_are_refused(rig: Rig) -> None:
    block = rig.session.allocate(16 * PAGE + 100, Bind((rig.nodes[0],)))
    here = Bind((rig.nodes[0],))
    for offset, nbytes in ((0, 0), (17 * PAGE, PAGE), (0, 18 * PAGE), (0, 1 << 61)):
        with pytest.raises(ValueError, match="no part of it"):
            rig.session.move_part(block, here, offset=offset, nbytes=nbytes)
    for offset, nbytes in ((1, PAGE), (0, PAGE + 1), (PAGE // 2, 2 * PAGE)):
        with pytest.raises(ValueError, match="begins and ends with pages"):
            rig.session.move_part(block, here, offset=offset, nbytes=nbytes)
    with pytest.raises(ValueError, match="offset=-1"):
        rig.session.move_part(block, here, offset=-1, nbytes=PAGE)
    rig.session.move_part(block, here, offset=16 * PAGE, nbytes=100)  # ends with the block
    small = rig.session.allocate(100, here)
    with pytest.raises(ValueError, match="shares its page"):
        rig.session.move_part(small, here, offset=0, nbytes=100)
