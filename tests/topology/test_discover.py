"""Discovery on made-up trees: golden output, and the facts each tree was made to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.topology import (
    Machine,
    NodeKind,
    Tier,
    discover,
    machine_from_json,
    machine_to_json,
)
from tests.fixtures.sysfs import GOLDEN, TREES
from tests.fixtures.sysfs import tree as written

GIB = 1 << 30


@pytest.mark.parametrize("name", TREES)
def test_json_of_a_tree_is_the_golden_one(name: str) -> None:
    golden = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    found = discover(written(name))
    assert json.loads(machine_to_json(found)) == json.loads(golden)
    assert machine_from_json(golden) == found


def tree(name: str) -> Machine:
    return discover(written(name))


def test_one_node_has_its_zones_blocks_and_huge_pages() -> None:
    node = tree("one_node").node(0)
    assert node.kind is NodeKind.DRAM
    assert node.cpus == (0, 1)
    assert (node.capacity_bytes, node.free_bytes) == (8 * GIB, 5 * GIB)
    assert {zone.name: zone.managed_bytes for zone in node.zones} == {
        "Normal": 8 * GIB,
        "DMA": 15 << 20,
    }
    assert [(group.valid_zones, group.blocks) for group in node.blocks] == [
        ("Normal", 3),
        ("none", 1),
    ]
    assert node.installed_bytes == 8 * GIB
    assert [(p.page_bytes, p.total, p.free) for p in node.huge_pages] == [
        (2 << 20, 16, 12),
        (1 << 30, 0, 0),
    ]
    assert node.llc_bytes == 32 << 20  # shared by both CPUs, counted once


def test_one_node_cgroup_v1_without_a_limit_has_none() -> None:
    limits = tree("one_node").limits
    assert (limits.cgroup_version, limits.cgroup_max_bytes) == (1, None)
    assert limits.cgroup_current_bytes == 3 * GIB


def test_two_sockets_give_local_and_remote_dram() -> None:
    machine = tree("two_sockets")
    assert machine.tiers == (Tier("ldram", (0,)), Tier("rdram", (1,)))
    assert machine.distances == {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}
    assert machine.limits.memlock_bytes is None


def test_cxl_node_is_known_by_its_whole_chain() -> None:
    machine = tree("two_sockets_cxl")
    node = machine.node(2)
    assert node.kind is NodeKind.CXL
    assert node.socket == 1
    assert node.evidence is not None
    assert node.evidence.kind == "cxl-region"
    assert node.evidence.region == "region0"
    assert node.evidence.endpoint_decoders == ("decoder2.0", "decoder3.0")
    assert node.evidence.memdevs == ("mem0", "mem1")
    assert node.evidence.pci_addresses == ("0000:0d:00.0", "0000:0e:00.0")
    assert (node.evidence.interleave_ways, node.evidence.interleave_granularity_bytes) == (2, 256)
    assert node.evidence.dax == "dax0.0"
    assert machine.tier("cxl").nodes == (2,)


def test_cxl_node_in_zone_movable_warns_of_pins() -> None:
    machine = tree("two_sockets_cxl")
    assert machine.node(2).movable_bytes == 4 * GIB
    assert any("ZONE_MOVABLE" in note and "online_kernel" in note for note in machine.notes)


def test_hmat_is_in_ns_and_bytes_per_s_and_from_the_best_initiator_only() -> None:
    machine = tree("two_sockets_cxl")
    access = machine.access(1, 2)
    assert access is not None
    assert (access.read_latency_ns, access.write_latency_ns) == (250, 260)
    assert (access.read_bandwidth_bytes_per_s, access.write_bandwidth_bytes_per_s) == (40e9, 30e9)
    assert machine.access(0, 2) is None


def test_device_dax_and_kmem_are_told_apart() -> None:
    dax = {device.name: device for device in tree("two_sockets_cxl").dax}
    assert (dax["dax0.0"].mode, dax["dax0.0"].target_node) == ("system-ram", 2)
    assert (dax["dax1.0"].mode, dax["dax1.0"].size_bytes) == ("devdax", GIB)
    assert dax["dax1.0"].cxl is not None
    assert dax["dax1.0"].cxl.memdevs == ("mem1",)


def test_gpu_is_found_on_its_socket_with_the_rate_of_its_link() -> None:
    (gpu,) = tree("two_sockets_cxl").gpus
    assert (gpu.pci_address, gpu.node, gpu.local_cpus) == ("0000:17:00.0", 1, (2, 3))
    assert gpu.link is not None
    # PCIe 4.0: 16 GT/s on 16 lanes, 128 of 130 bits are payload
    assert gpu.link.peak_bandwidth_bytes_per_s == pytest.approx(31.5e9, rel=0.01)
    assert gpu.memory_bytes is None


def test_snc4_tiers_start_at_the_domain_the_process_is_bound_to() -> None:
    machine = tree("snc4")
    assert machine.initiator == 2
    assert machine.tiers == (Tier("ldram", (2, 0, 1, 3)), Tier("rdram", (4, 5, 6, 7)))


def test_offline_memory_is_not_usable_and_the_remedy_is_said() -> None:
    machine = tree("offline_node")
    assert [node.id for node in machine.usable_nodes()] == [0, 1]
    assert machine.node(2).online
    assert not machine.node(3).online
    assert any("node 3 is possible but offline" in note for note in machine.notes)
    assert any("node 2" in note and "online_kernel" in note for note in machine.notes)


def test_cpuset_hides_a_node_and_the_parent_cgroup_limits() -> None:
    machine = tree("cpuset_hides_node")
    assert [node.id for node in machine.usable_nodes()] == [0]
    assert not machine.node(1).allowed
    assert machine.limits.mems_allowed == (0,)
    assert machine.limits.cgroup_max_bytes == 4 * GIB
    assert machine.limits.cgroup_high_bytes == 3 * GIB
    assert machine.limits.cgroup_max_bytes - machine.limits.cgroup_current_bytes == 3 * GIB
    assert any("cpuset" in note for note in machine.notes)
    assert any("4 GiB of 8 GiB" in note for note in machine.notes)


def test_gh200_gpu_memory_is_never_used_unless_asked() -> None:
    machine = tree("gh200")
    assert machine.node(1).kind is NodeKind.GPU
    assert machine.node(1).gpu == "0009:01:00.0"
    assert [node.id for node in machine.usable_nodes()] == [0]
    assert [node.id for node in machine.usable_nodes(include_gpu_memory=True)] == [0, 1]
    assert machine.tier("hbm").nodes == (1,)
    (gpu,) = machine.gpus
    assert (gpu.node, gpu.memory_node, gpu.memory_bytes) == (0, 1, 96 * GIB)
    assert gpu.model == "NVIDIA GH200 480GB"
    # 64 KiB pages: zoneinfo counts pages
    assert sum(zone.managed_bytes for zone in machine.node(0).zones) == 480 * GIB


def test_this_machine_is_read_without_a_problem() -> None:
    machine = discover()
    assert machine.usable_nodes()
    assert not machine.simulated
    assert machine.node(machine.initiator).cpus
    usable = {node.id for node in machine.usable_nodes(include_gpu_memory=True)}
    assert all(set(tier.nodes) <= usable for tier in machine.tiers)


def test_a_folder_that_is_no_capture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither sys nor proc"):
        discover(tmp_path)
