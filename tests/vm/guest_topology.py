"""Inside a machine: what topology discovers is what the machine's file says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cxl_offload.topology import NodeKind, discover
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
MACHINE = discover()
KERNEL_WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
_CXL_MEMORY_CLASS = "0x050210"


@pytest.mark.parametrize("node_id", SPEC.node_ids)
def test_node_is_what_the_machine_has(node_id: int) -> None:
    expected, node = SPEC.node(node_id), MACHINE.node(node_id)
    assert node.kind is NodeKind(expected.kind)
    assert node.cpus == SPEC.cpu_numbers(node_id)
    assert node.online
    assert node.allowed
    # The kernel's own image, page structures and firmware tables are not to be had.
    assert 0.8 * expected.memory_bytes < node.capacity_bytes <= expected.memory_bytes
    gigantic = {pool.page_bytes: pool.total for pool in node.huge_pages}[1 << 30]
    assert gigantic == expected.gigantic_pages


def test_there_are_no_other_nodes_with_memory() -> None:
    assert tuple(node.id for node in MACHINE.usable_nodes()) == SPEC.node_ids


def test_distances_and_tiers() -> None:
    table = SPEC.distance_table()
    assert MACHINE.distances == table
    nearness = table[MACHINE.initiator]
    expected = {
        name: tuple(sorted(nodes, key=lambda node: (nearness[node], node)))
        for name, nodes in SPEC.tiers().items()
    }
    assert {tier.name: tier.nodes for tier in MACHINE.tiers} == expected


def test_hmat_gives_every_node_from_its_nearest_cpus() -> None:
    found = {(access.initiator, access.target): access for access in MACHINE.accesses}
    for node in SPEC.boot_nodes:
        initiator = node.id if node.near is None else node.near
        access = found.pop((initiator, node.id))
        latency = SPEC.latency_ns[initiator][node.id]
        bandwidth = SPEC.bandwidth_mb_per_s[initiator][node.id] * 1e6
        assert (access.read_latency_ns, access.write_latency_ns) == (latency, latency)
        assert access.read_bandwidth_bytes_per_s == bandwidth
    # What the kernel makes up for memory that came later is in no table of the firmware.
    hot_plugged = {node.id for node in SPEC.nodes} - {node.id for node in SPEC.boot_nodes}
    assert {target for _, target in found} <= hot_plugged


@pytest.mark.parametrize("node_id", [n.id for n in SPEC.nodes if n.evidence])
def test_evidence_for_cxl_is_named(node_id: int) -> None:
    evidence = MACHINE.node(node_id).evidence
    assert evidence is not None
    assert evidence.kind == SPEC.node(node_id).evidence


def test_kernel_is_the_one_that_the_machine_names() -> None:
    release = os.uname().release
    found = re.match(r"(\d+)\.(\d+)\.", release)
    assert found
    assert f"{found[1]}.{found[2]}" == SPEC.kernel
    assert KERNEL_WEIGHTS.exists() == ((int(found[1]), int(found[2])) >= (6, 9))


if SPEC.cxl is not None:

    def test_chain_of_evidence_leads_to_the_pci_device() -> None:
        """Node, DAX device, region, decoder, memory device, PCI function: each one exists."""
        evidence = MACHINE.node(SPEC.cxl.node).evidence
        assert evidence is not None
        cxl = Path("/sys/bus/cxl/devices")
        dax = Path("/sys/bus/dax/devices") / str(evidence.dax)
        assert int((dax / "target_node").read_text()) == SPEC.cxl.node
        assert evidence.region in str(dax.resolve())
        (decoder,) = evidence.endpoint_decoders
        assert (cxl / str(evidence.region) / "target0").read_text().strip() == decoder
        (memdev,) = evidence.memdevs
        (address,) = evidence.pci_addresses
        assert address in str((cxl / memdev).resolve())
        pci = Path("/sys/bus/pci/devices") / address
        assert (pci / "class").read_text().strip() == _CXL_MEMORY_CLASS
        assert evidence.interleave_ways == 1

    def test_zone_of_the_cxl_node_is_named() -> None:
        node = MACHINE.node(SPEC.cxl.node)
        zones = {zone.name: zone.managed_bytes for zone in node.zones}
        zone = "Movable" if SPEC.cxl.online == "online_movable" else "Normal"
        assert zones == {zone: node.capacity_bytes}
        assert {(group.state, group.valid_zones) for group in node.blocks} == {("online", zone)}
        warned = any(
            "ZONE_MOVABLE" in note and f"node {SPEC.cxl.node}" in note for note in MACHINE.notes
        )
        assert warned == (zone == "Movable")
