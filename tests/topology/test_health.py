"""Counters of memory errors, read from trees, and as ``cxl-offload topology`` shows them."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.topology import discover
from cxl_offload.topology.health import (
    CardErrors,
    ControllerErrors,
    LostPages,
    MachineHealth,
    read_health,
)
from cxl_offload.topology.tree import Tree

from .test_hazards import controller, healthy, link_errors, lost_pages, put

HEAD = "Health of the memory"


def health_of(root: Path) -> MachineHealth:
    return read_health(Tree(root), discover(root))


def counting(root: Path) -> Path:
    """A healthy machine whose kernel and cards count everything, and have counted nothing."""
    healthy(root)
    for node in range(3):
        put(root, f"sys/devices/system/node/node{node}/memory_failure/total", "0")
    (evidence,) = (node.evidence for node in discover(root).nodes if node.evidence is not None)
    assert evidence.pci_addresses[0] == "0000:0d:00.0"
    for address in evidence.pci_addresses:
        for kind, total in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
            put(root, f"sys/bus/pci/devices/{address}/aer_dev_{kind}", f"TOTAL_ERR_{total} 0")
    put(root, "proc/meminfo", "HardwareCorrupted: 0 kB")
    return root


def shown(root: Path) -> list[str]:
    """What the command prints after the head of its part; nothing where there is none."""
    result = CliRunner().invoke(app, ["topology", "--sysfs", str(root)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    _, _, part = result.stdout.partition(f"{HEAD}\n")
    return [line.strip() for line in part.splitlines()]


def test_every_counter_is_read(tmp_path: Path) -> None:
    root = counting(tmp_path / "tree")
    lost_pages(total=3, recovered=2, failed=1)(root)
    put(root, "proc/meminfo", "HardwareCorrupted: 20 kB")
    controller(7, 1)(root)
    link_errors("nonfatal", "TOTAL_ERR_NONFATAL", 4)(root)
    health = health_of(root)
    nodes = {node.node: node for node in health.nodes}
    assert nodes[0].lost == LostPages(0)
    assert nodes[2].lost == LostPages(3, recovered=2, failed=1)
    assert nodes[2].cards[0] == CardErrors("0000:0d:00.0", 0, 4, 0)
    assert health.soft_offlined_bytes == 20 * 1024 - 3 * 4096
    assert health.controllers == (
        ControllerErrors(
            "mc0", "Skylake Socket#0 IMC#0", 7, 1, ("CPU_SrcID#0_MC#0_Chan#0_DIMM#0",)
        ),
    )


def test_what_is_not_counted_is_unknown_and_not_zero(tmp_path: Path) -> None:
    health = health_of(healthy(tmp_path / "tree"))
    assert all(node.lost is None for node in health.nodes)
    (cxl,) = (node for node in health.nodes if node.node == 2)
    assert cxl.cards == ()
    assert cxl.uncounted[0] == "0000:0d:00.0"


def test_node_whose_memory_is_gone_still_tells_of_its_lost_pages(tmp_path: Path) -> None:
    root = counting(tmp_path / "tree")
    lost_pages(total=1, recovered=1)(root)
    put(root, "sys/devices/system/node/online", "0-1")
    assert [node.node for node in health_of(root).nodes] == [0, 1, 2]
    lost_pages(total=0)(root)
    assert [node.node for node in health_of(root).nodes] == [0, 1]


def test_topology_says_nothing_where_all_is_well(tmp_path: Path) -> None:
    assert shown(counting(tmp_path / "tree")) == []


def test_topology_has_a_line_for_each_node_and_controller_with_errors(tmp_path: Path) -> None:
    root = counting(tmp_path / "tree")
    lost_pages(total=3, recovered=2, failed=1)(root)
    put(root, "proc/meminfo", "HardwareCorrupted: 20 kB")
    controller(7, 1)(root)
    link_errors("correctable", "TOTAL_ERR_COR", 9)(root)
    assert shown(root) == [
        "node 2: 3 pages lost (2 recovered, 1 failed); card 0000:0d:00.0 has counted 9 correctable "
        "errors",
        "mc0 (Skylake Socket#0 IMC#0): 7 corrected, 1 uncorrected errors "
        "(CPU_SrcID#0_MC#0_Chan#0_DIMM#0)",
        "8 KiB out of use on nodes unknown, moved away after corrected errors",
    ]


def test_topology_names_nodes_that_cannot_be_known_in_one_line(tmp_path: Path) -> None:
    first, second = shown(healthy(tmp_path / "tree"))[:2]
    assert first == "nodes 0-1: lost pages are not known: this kernel does not count them"
    assert second.startswith(first.removeprefix("nodes 0-1: ").join(["node 2: ", ";"]))
    assert "errors of card 0000:0d:00.0 are not known" in second


def test_machine_file_has_no_health() -> None:
    result = CliRunner().invoke(app, ["topology", "--machine", "epyc9354-cxl-a"])
    assert result.exit_code == 0
    assert HEAD not in result.stdout
