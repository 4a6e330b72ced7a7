"""Shared memory on every node set of a real kernel: the pages themselves say where they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from cxl_offload.memory import Bind, Interleave, Policy, Preferred, SharedRegion, Weighted
from cxl_offload.memory.shared import SHARED_ROOT
from tests.placement.kernel_calls import PAGE
from tests.placement.rig import MACHINE_UNDER_TEST, Rig, node_sets, rig_names
from tests.placement.test_policies import WEIGHTS, expected_nodes

GRANULE = 64 << 10
REAL = [name for name in rig_names() if not name.startswith("simulated-")]


def _policies(nodes: tuple[int, ...]) -> list[Policy]:
    found: list[Policy] = [Bind(nodes), Preferred(nodes)]
    if len(nodes) > 1:
        weights = dict(zip(nodes, WEIGHTS, strict=False))
        found.append(Interleave(nodes, granule_bytes=GRANULE))
        found.append(Weighted(weights, granule_bytes=GRANULE))
    return found


CASES = [
    pytest.param(name, policy, id=f"{name}-{policy}")
    for name in REAL
    for nodes in node_sets(name)
    for policy in _policies(nodes)
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder in memory: that of the host, or in a guest, whose host's is not its own."""
    return SHARED_ROOT if MACHINE_UNDER_TEST is None else tmp_path


@pytest.mark.parametrize(("rig", "policy"), CASES, indirect=["rig"])
def test_shared_pages_are_where_the_policy_says(rig: Rig, policy: Policy, root: Path) -> None:
    nbytes = 37 * GRANULE + PAGE
    region = SharedRegion(
        f"test-{uuid4().hex}", nbytes, policy, mappers=2, session=rig.session, root=root
    )
    second = SharedRegion(
        region.path.stem.removeprefix("cxl_offload_kv_"),
        nbytes,
        policy,
        mappers=2,
        session=rig.session,
        root=root,
    )
    actual = rig.page_nodes(region.address, nbytes)
    assert actual == expected_nodes(policy, nbytes)
    assert rig.page_nodes(second.address, nbytes) == actual
    assert region.placement().granted == {n: pages * PAGE for n, pages in Counter(actual).items()}
    assert not region.notes
    for each in (region, second):
        each.close()
    assert not region.path.exists()


@pytest.mark.parametrize("rig", REAL, indirect=True)
def test_slots_of_ranks_are_each_on_their_own_node(rig: Rig, root: Path) -> None:
    slot, rows, ranks = 3 * PAGE, 16, len(rig.nodes)
    row = slot * ranks
    region = SharedRegion(f"test-{uuid4().hex}", rows * row, session=rig.session, root=root)
    for rank, node in enumerate(rig.nodes):
        region.place(
            Preferred((node,)), offset=rank * slot, part_bytes=slot, stride_bytes=row, count=rows
        )
    expected = [node for node in rig.nodes for _ in range(slot // PAGE)] * rows
    assert rig.page_nodes(region.address, region.nbytes) == expected
    region.close()
