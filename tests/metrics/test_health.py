"""Errors that the machine has counted, on generated trees."""

from __future__ import annotations

from pathlib import Path

from cxl_offload import Session, load_machine
from cxl_offload.metrics import MetricsReader
from cxl_offload.topology import Machine, discover
from cxl_offload.topology.hazards import find_hazards
from cxl_offload.topology.health import MachineHealth, read_health
from cxl_offload.topology.tree import Tree

from ..topology.test_hazards import controller, healthy, link_errors, lost_pages, put


class Looks:
    """Reads a tree, and counts how often."""

    def __init__(self, root: Path) -> None:
        self.root, self.times = root, 0

    def __call__(self, machine: Machine) -> MachineHealth:
        self.times += 1
        return read_health(Tree(self.root), discover(self.root))


def reader_of(looks: Looks, now: list[float]) -> MetricsReader:
    session = Session.linux(discover(looks.root))
    return MetricsReader(
        session, clock=lambda: now[0], find=lambda: find_hazards(looks.root), look=looks
    )


def values(reader: MetricsReader, stem: str) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in reader.read().get(stem, ())}


def test_counters_are_those_of_the_tree_by_node_and_part(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    lost_pages(total=3, recovered=2, failed=1)(root)
    put(root, "proc/meminfo", "HardwareCorrupted: 20 kB")
    controller(7, 1)(root)
    link_errors("correctable", "TOTAL_ERR_COR", 9)(root)
    reader = reader_of(Looks(root), [0.0])
    assert values(reader, "node.lost_pages") == {
        ("2", "cxl", "recovered"): 2,
        ("2", "cxl", "ignored"): 0,
        ("2", "cxl", "failed"): 1,
        ("2", "cxl", "delayed"): 0,
    }
    assert values(reader, "node.link_errors") == {
        ("2", "cxl", "0000:0d:00.0", "correctable"): 9,
        ("2", "cxl", "0000:0d:00.0", "nonfatal"): 0,
        ("2", "cxl", "0000:0d:00.0", "fatal"): 0,
    }
    assert values(reader, "memory.errors") == {("mc0", "corrected"): 7, ("mc0", "uncorrected"): 1}
    assert values(reader, "memory.soft_offlined") == {(): 20 * 1024 - 3 * 4096}
    assert ("lost-pages", "error") in values(reader, "findings")


def test_what_a_kernel_does_not_count_has_no_samples(tmp_path: Path) -> None:
    """Zero would say that the memory is well."""
    root = healthy(tmp_path / "tree")
    (root / "proc/meminfo").unlink(missing_ok=True)
    reader = reader_of(Looks(root), [0.0])
    for stem in ("node.lost_pages", "node.link_errors", "memory.errors", "memory.soft_offlined"):
        assert values(reader, stem) == {}


def test_counters_are_read_once_a_minute(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    now, looks = [0.0], Looks(root)
    reader = reader_of(looks, now)
    for at, lost in ((0.0, 0), (59.0, 1), (60.0, 2)):
        now[0] = at
        lost_pages(total=lost, recovered=lost)(root)
        seen = values(reader, "node.lost_pages")["2", "cxl", "recovered"]
        assert seen == (0 if at < 60 else 2)
    assert looks.times == 2


def test_simulated_machine_is_not_asked(tmp_path: Path) -> None:
    looks = Looks(healthy(tmp_path / "tree"))
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    assert "node.lost_pages" not in MetricsReader(session, look=looks).read()
    assert looks.times == 0
