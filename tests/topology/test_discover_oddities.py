"""What is missing, unreadable, unusual or wrong: handled, and said in the notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxl_offload.topology import NodeKind, discover
from tests.topology.tree_writer import GIB, NODES, TreeWriter

PMEM = "sys/devices/LNXSYSTM:00/ACPI0012:00/ndbus0/region0/dax0.0"


def base(root: Path, *, nodes: int = 1, cpus_allowed: str = "0-3", mems: str = "0-9") -> TreeWriter:
    """Node 0 with CPUs and local HMAT; nodes without CPUs after it, 4 GiB each, distance 20."""
    tree = TreeWriter(root, hostname="odd")
    last = nodes - 1
    listed = f"0-{last}" if last else "0"
    tree.node_lists(online=listed, possible=listed, has_cpu="0", has_memory=listed)
    for node in range(nodes):
        distance = [10 if other == node else 20 for other in range(nodes)]
        tree.node(
            node,
            cpus="" if node else "0-3",
            total_bytes=4 * GIB,
            free_bytes=2 * GIB,
            distance=distance,
        )
    tree.process(cpus=cpus_allowed, mems=mems)
    return tree


def unreadable(root: Path, path: str) -> None:
    """A folder in the place of a file: reading fails, for root too."""
    (root / path).unlink(missing_ok=True)
    (root / path).mkdir(parents=True)


def test_unreadable_meminfo_makes_the_node_unused_and_is_said(tmp_path: Path) -> None:
    base(tmp_path, nodes=2)
    unreadable(tmp_path, f"{NODES}/node1/meminfo")
    machine = discover(tmp_path)
    assert [node.id for node in machine.usable_nodes()] == [0]
    assert any(f"cannot read /{NODES}/node1/meminfo" in note for note in machine.notes)
    assert any("node 1: its memory is unknown" in note for note in machine.notes)


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    tree = TreeWriter(tmp_path, hostname="flat")
    tree.file("proc/meminfo", "MemTotal:        2097152 kB\nMemFree:         1048576 kB")
    tree.file("sys/devices/system/cpu/online", "0-1")
    machine = discover(tmp_path)
    (node,) = machine.nodes
    assert (node.kind, node.cpus, node.capacity_bytes) == (NodeKind.DRAM, (0, 1), 2 * GIB)
    assert any("no NUMA" in note for note in machine.notes)


def test_missing_process_files_mean_no_limits_and_a_note(tmp_path: Path) -> None:
    base(tmp_path)
    for path in (tmp_path / "proc" / "self").iterdir():
        path.unlink()
    machine = discover(tmp_path)
    assert machine.limits.mems_allowed is None
    assert machine.usable_nodes()
    assert any("Mems_allowed_list" in note for note in machine.notes)


def test_malformed_lists_are_noted_and_read_as_absent(tmp_path: Path) -> None:
    tree = base(tmp_path, mems="all of them")
    tree.file(f"{NODES}/node0/cpulist", "0..3")
    machine = discover(tmp_path)
    assert machine.node(0).cpus == ()
    assert any("cpulist" in note and "'0..3'" in note for note in machine.notes)
    assert any("Mems_allowed_list" in note for note in machine.notes)


def test_distance_with_a_wrong_number_of_columns_is_dropped(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.file(f"{NODES}/node1/distance", "20 10 30")
    machine = discover(tmp_path)
    assert machine.distance(0, 1) == 20
    assert machine.distance(1, 0) is None
    assert any("node1/distance" in note for note in machine.notes)


def test_distance_columns_are_the_online_nodes_not_all_ids(tmp_path: Path) -> None:
    tree = TreeWriter(tmp_path, hostname="gap")
    tree.node_lists(online="0,2", possible="0-3", has_cpu="0", has_memory="0,2")
    tree.node(0, cpus="0-3", total_bytes=GIB, free_bytes=GIB, distance=(10, 17))
    tree.node(2, cpus="", total_bytes=GIB, free_bytes=GIB, distance=(17, 10))
    tree.process(cpus="0-3", mems="0-3")
    assert discover(tmp_path).distances == {0: {0: 10, 2: 17}, 2: {0: 17, 2: 10}}


def test_slower_by_hmat_is_cxl_with_that_evidence(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.hmat(0, initiators=[0], latency_ns=(100, 100), bandwidth_mb_per_s=(200000, 200000))
    tree.hmat(1, initiators=[0], latency_ns=(300, 300), bandwidth_mb_per_s=(30000, 30000))
    machine = discover(tmp_path)
    evidence = machine.node(1).evidence
    assert evidence is not None
    assert evidence.kind == "hmat-cpuless"
    assert "300 ns against 100 ns" in evidence.detail
    assert machine.tier("cxl").nodes == (1,)


def test_faster_by_hmat_is_hbm(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.hmat(0, initiators=[0], latency_ns=(100, 100), bandwidth_mb_per_s=(200000, 200000))
    tree.hmat(1, initiators=[0], latency_ns=(120, 120), bandwidth_mb_per_s=(700000, 700000))
    machine = discover(tmp_path)
    assert machine.node(1).kind is NodeKind.HBM
    assert machine.tier("hbm").nodes == (1,)


@pytest.mark.parametrize(
    ("distance", "kind"), [(20, NodeKind.CXL), (14, NodeKind.CXL), (13, NodeKind.UNKNOWN)]
)
def test_distance_alone_is_weak_evidence(tmp_path: Path, distance: int, kind: NodeKind) -> None:
    tree = base(tmp_path, nodes=2)
    tree.file(f"{NODES}/node0/distance", f"10 {distance}")
    machine = discover(tmp_path)
    node = machine.node(1)
    assert node.kind is kind
    assert (node.evidence is not None) == (kind is NodeKind.CXL)
    if node.evidence is not None:
        assert node.evidence.kind == "distance-cpuless"
        assert any("weak evidence" in note for note in machine.notes)


def test_class_0_is_read_where_an_older_kernel_has_no_class_1(tmp_path: Path) -> None:
    tree = base(tmp_path)
    tree.hmat(
        0,
        initiators=[0],
        latency_ns=(90, 0),
        bandwidth_mb_per_s=(1000, 0),
        classes=["access0"],
    )
    access = discover(tmp_path).access(0, 0)
    assert access is not None
    assert (access.read_latency_ns, access.source) == (90, "HMAT access0")
    assert access.write_latency_ns is None  # the kernel shows 0 for "not given"
    assert access.write_bandwidth_bytes_per_s is None


def test_class_1_wins_because_class_0_may_be_the_accelerator_s(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    for name, latency, initiator in (("access0", 50, 1), ("access1", 400, 0)):
        tree.hmat(
            1,
            initiators=[initiator],
            latency_ns=(latency, latency),
            bandwidth_mb_per_s=(1000, 1000),
            classes=[name],
        )
    machine = discover(tmp_path)
    access = machine.access(0, 1)
    assert access is not None
    assert access.read_latency_ns == 400
    assert machine.access(1, 1) is None


def test_hmat_without_an_initiator_is_not_used(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.hmat(1, initiators=[], latency_ns=(5, 5), bandwidth_mb_per_s=(9, 9), classes=["access0"])
    machine = discover(tmp_path)
    assert machine.accesses == ()
    assert any("links no CPU initiator" in note and "5 ns" in note for note in machine.notes)


def test_persistent_memory_is_no_tier(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.dax("dax0.0", parent=PMEM.rsplit("/", 1)[0], driver="kmem", size_bytes=GIB, target_node=1)
    machine = discover(tmp_path)
    assert machine.node(1).kind is NodeKind.UNKNOWN
    assert machine.tier_of(1) is None
    assert any("persistent memory" in note for note in machine.notes)
    assert machine.dax[0].cxl is None


def test_dax_without_a_driver_or_node_is_unbound(tmp_path: Path) -> None:
    tree = base(tmp_path)
    tree.dax("dax3.0", parent="sys/devices/hmem.0", driver=None, size_bytes=GIB, target_node=-1)
    (device,) = discover(tmp_path).dax
    assert (device.mode, device.target_node) == ("unbound", None)


def test_mi300a_memory_is_gpu_memory_even_with_cpus(tmp_path: Path) -> None:
    tree = base(tmp_path)
    tree.gpu(
        "0000:01:00.0", vendor=0x1002, device=0x74A0, node=0, cpus=range(4), pci_class=0x120000
    )
    machine = discover(tmp_path)
    assert machine.node(0).kind is NodeKind.GPU
    assert machine.usable_nodes() == ()
    assert machine.tier("hbm").nodes == (0,)
    assert any("GPU memory only" in note for note in machine.notes)


def test_generic_initiator_node_of_an_nvidia_machine_is_gpu_memory(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.file(f"{NODES}/has_generic_initiator", "1")
    tree.gpu("0009:01:00.0", vendor=0x10DE, device=0x2342, node=0, cpus=range(4))
    machine = discover(tmp_path)
    assert machine.node(1).kind is NodeKind.GPU
    assert machine.node(1).gpu == "0009:01:00.0"
    assert [node.id for node in machine.usable_nodes()] == [0]


def test_gpu_whose_own_node_has_no_cpus_owns_that_node(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.gpu("0009:01:00.0", vendor=0x10DE, device=0x2342, node=1, cpus=range(4))
    machine = discover(tmp_path)
    assert (machine.gpus[0].memory_node, machine.gpus[0].node) == (1, 0)
    assert machine.node(1).kind is NodeKind.GPU


def test_gpu_memory_status_that_is_not_online_is_no_node(tmp_path: Path) -> None:
    tree = base(tmp_path, nodes=2)
    tree.gpu("0009:01:00.0", vendor=0x10DE, device=0x2342, node=0, cpus=range(4))
    tree.file(
        "proc/driver/nvidia/gpus/0009:01:00.0/numa_status", "Node:      1\nStatus:    offline"
    )
    assert discover(tmp_path).gpus[0].memory_node is None


def test_other_devices_are_no_gpus(tmp_path: Path) -> None:
    tree = base(tmp_path)
    tree.gpu("0000:02:00.0", vendor=0x1A03, device=0x2000, node=0, cpus=[], pci_class=0x030000)
    tree.gpu("0000:03:00.0", vendor=0x10DE, device=0x1000, node=0, cpus=[], pci_class=0x040300)
    assert discover(tmp_path).gpus == ()


def test_gpu_of_a_silent_firmware_has_no_node_when_every_cpu_is_local(tmp_path: Path) -> None:
    tree = TreeWriter(tmp_path, hostname="silent")
    tree.node_lists(online="0-1", possible="0-1", has_cpu="0-1", has_memory="0-1")
    tree.node(0, cpus="0", total_bytes=GIB, free_bytes=GIB, distance=(10, 20))
    tree.node(1, cpus="1", total_bytes=GIB, free_bytes=GIB, distance=(20, 10))
    tree.gpu("0000:04:00.0", vendor=0x10DE, device=1, node=-1, cpus=[0, 1])
    tree.gpu("0000:05:00.0", vendor=0x10DE, device=1, node=-1, cpus=[1])
    tree.process(cpus="0-1", mems="0-1")
    assert [(gpu.name, gpu.node) for gpu in discover(tmp_path).gpus] == [
        ("gpu0", None),
        ("gpu1", 1),
    ]


@pytest.mark.parametrize(
    ("link", "gb_per_s"),
    [
        (("5.0 GT/s PCIe", "16"), 8.0),
        (("32.0 GT/s PCIe", "16"), 63.0),
        (("64.0 GT/s PCIe", "8"), 60.5),
        (("Unknown", "16"), None),
        (("16.0 GT/s PCIe", "255"), None),
    ],
)
def test_link_rate_is_that_of_the_encoding(
    tmp_path: Path, link: tuple[str, str], gb_per_s: float | None
) -> None:
    tree = base(tmp_path)
    tree.gpu("0000:04:00.0", vendor=0x10DE, device=1, node=0, cpus=[0], link=link)
    found = discover(tmp_path).gpus[0].link
    if gb_per_s is None:
        assert found is None
    else:
        assert found is not None
        assert found.peak_bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=0.002)


def test_tree_does_not_follow_links_out_of_a_capture(tmp_path: Path) -> None:
    root = tmp_path / "capture"
    tree = base(root)
    tree.dax("dax0.0", parent="sys/devices/x/region0", driver="kmem", size_bytes=1, target_node=0)
    outside = tmp_path / "region0" / "dax9.0"
    outside.mkdir(parents=True)
    (root / "sys/bus/dax/devices/dax9.0").symlink_to(outside)
    tree.file("sys/bus/cxl/devices/region0/interleave_ways", 1)
    found = {device.name: device.cxl for device in discover(root).dax}
    assert found["dax0.0"] is not None
    assert found["dax9.0"] is None
