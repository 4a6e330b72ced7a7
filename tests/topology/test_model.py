"""Invariants and questions of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cxl_offload.topology import (
    Access,
    DmaPath,
    Gpu,
    Machine,
    Node,
    NodeKind,
    Tier,
    Zone,
    seen_from,
)

GIB = 1 << 30
NODES = (
    Node(0, NodeKind.DRAM, (0, 1), 8 * GIB, socket=0),
    Node(1, NodeKind.DRAM, (2, 3), 8 * GIB, socket=1),
    Node(2, NodeKind.CXL, (), 4 * GIB),
    Node(3, NodeKind.GPU, (), 2 * GIB),
    Node(4, NodeKind.DRAM, (4,), 8 * GIB, allowed=False),
    Node(5, NodeKind.UNKNOWN, (), 0, online=False),
)
DISTANCES = {0: {0: 10, 1: 21, 2: 24}, 1: {0: 21, 1: 10, 2: 14}}


def machine(**changes: Any) -> Machine:
    return Machine(name="m", nodes=NODES, distances=DISTANCES, **changes)


def test_usable_nodes_leave_out_offline_forbidden_empty_and_gpu_memory() -> None:
    assert [node.id for node in machine().usable_nodes()] == [0, 1, 2]


def test_usable_nodes_hold_gpu_memory_only_when_asked() -> None:
    asked = machine().usable_nodes(include_gpu_memory=True)
    assert [node.id for node in asked] == [0, 1, 2, 3]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    it = machine(tiers=(Tier("cxl", (2,)),), gpus=(Gpu("gpu0"),))
    with pytest.raises(ValueError, match=r"no node 9; its nodes are 0, 1, 2, 3, 4, 5"):
        it.node(9)
    with pytest.raises(ValueError, match=r"no tier 'hbm'; its tiers are cxl"):
        it.tier("hbm")
    with pytest.raises(ValueError, match=r"no GPU 'gpu1'; its GPUs are gpu0"):
        it.gpu("gpu1")


@pytest.mark.parametrize(
    "changes",
    [
        {"initiator": 9},
        {"accesses": (Access(0, 9),)},
        {"tiers": (Tier("cxl", (9,)),)},
        {"gpus": (Gpu("gpu0", node=9),)},
        {"gpus": (Gpu("gpu0", memory_node=9),)},
        {"gpus": (Gpu("gpu0"), Gpu("gpu0"))},
        {"dma_paths": (DmaPath("gpu0", 0),)},
        {"gpus": (Gpu("gpu0"),), "dma_paths": (DmaPath("gpu0", 9),)},
    ],
)
def test_machine_refuses_references_to_what_it_has_not(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"node 9|share a name|no GPU"):
        machine(**changes)


def test_machine_refuses_nodes_out_of_order_and_distances_of_others() -> None:
    with pytest.raises(ValueError, match="ascending"):
        Machine(name="m", nodes=NODES[1::-1])
    with pytest.raises(ValueError, match="node 7"):
        Machine(name="m", nodes=NODES, distances={0: {7: 10}})
    with pytest.raises(ValueError, match="ascending"):
        Machine(name="m", nodes=())


def test_node_refuses_impossible_values() -> None:
    with pytest.raises(ValueError, match="negative"):
        Node(0, NodeKind.DRAM, (), -1)
    with pytest.raises(ValueError, match="ascending"):
        Node(0, NodeKind.DRAM, (1, 0), 1)


def test_parts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NODES[0].capacity_bytes = 0  # type: ignore[misc]
    assert not hasattr(NODES[0], "__dict__")


def test_dma_bandwidth_is_that_of_the_copy_not_of_the_cpu() -> None:
    it = machine(
        gpus=(Gpu("gpu0", pci_address="0000:17:00.0"),),
        accesses=(Access(0, 2, read_bandwidth_bytes_per_s=40e9),),
        dma_paths=(DmaPath("gpu0", 2, 18e9, 12e9),),
    )
    assert it.dma_bandwidth("gpu0", 2) == 18e9
    assert it.dma_bandwidth("0000:17:00.0", 2, direction="d2h") == 12e9
    assert it.dma_bandwidth(it.gpus[0], 0) is None


def test_seen_from_names_tiers_from_the_other_socket() -> None:
    it = machine(initiator=0, tiers=(Tier("ldram", (0,)), Tier("nvme", ())))
    tiers = {tier.name: tier.nodes for tier in seen_from(it, 1).tiers}
    assert tiers == {"ldram": (1,), "rdram": (0,), "cxl": (2,), "hbm": (3,), "nvme": ()}
    assert it.tier_of(0) == Tier("ldram", (0,))


def test_seen_from_refuses_a_node_without_cpus() -> None:
    with pytest.raises(ValueError, match="no CPUs"):
        seen_from(machine(), 2)


def test_movable_bytes_count_only_the_movable_zone() -> None:
    zones = (Zone("Normal", GIB), Zone("Movable", 3 * GIB))
    assert Node(2, NodeKind.CXL, (), 4 * GIB, zones=zones).movable_bytes == 3 * GIB
