"""Hazards on captured trees: each there when its cause is, and gone when the cause is removed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.topology.hazards import SEVERITIES, Hazard, find_hazards
from tests.fixtures.sysfs import tree

from .tree_writer import GIB, NODES, TreeWriter

STATUS = "Name:\tpython\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t{mems}\nSeccomp:\t{mode}\n"

Change = Callable[[Path], None]


def copy_of(name: str, root: Path) -> Path:
    shutil.copytree(tree(name), root, symlinks=True)
    return root


def healthy(root: Path) -> Path:
    """Two sockets with a CXL node and a GPU beside it, where nothing hurts."""
    copy_of("two_sockets_cxl", root)
    put(root, "proc/zoneinfo", (root / "proc/zoneinfo").read_text().replace("Movable", " Normal"))
    for path, text in {
        "proc/self/limits": "Max locked memory         unlimited            unlimited  bytes",
        "proc/sys/kernel/numa_balancing": "0",
        "proc/sys/kernel/osrelease": "6.12.9-amd64",
        "proc/sys/vm/max_map_count": "1048576",
        "proc/sys/vm/overcommit_memory": "0",
        "proc/sys/vm/zone_reclaim_mode": "0",
        "proc/swaps": "Filename\t\tType\t\tSize\t\tUsed\t\tPriority",
        "sys/kernel/mm/numa/demotion_enabled": "false",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }.items():
        put(root, path, text)
    return root


def put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{text}\n", encoding="utf-8")


def write(path: str, text: str) -> Change:
    return lambda root: put(root, path, text)


def status(*, mems: str = "0-2", seccomp: int = 0, capabilities: int = 0) -> Change:
    text = STATUS.format(mems=mems, mode=seccomp) + f"CapEff:\t{capabilities:016x}"
    return write("proc/self/status", text)


def meminfo(node: int, *, free: int, cached: int = 0) -> Change:
    lines = {"MemTotal": 8 * GIB, "MemFree": free, "Active(file)": cached, "Inactive(file)": 0}
    text = "\n".join(f"Node {node} {name}: {count >> 10} kB" for name, count in lines.items())
    return write(f"{NODES}/node{node}/meminfo", text)


def movable_zone(root: Path) -> None:
    text = (tree("two_sockets_cxl") / "proc/zoneinfo").read_text()
    assert "Movable" in text
    put(root, "proc/zoneinfo", text)


def cgroup_of_4_gib(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/job")
    put(root, "sys/fs/cgroup/job/memory.max", str(4 * GIB))
    put(root, "sys/fs/cgroup/job/memory.current", str(GIB))


def gpu_on_the_other_socket(root: Path) -> None:
    put(root, "sys/bus/pci/devices/0000:17:00.0/numa_node", "0")


def offline_block(root: Path) -> None:
    put(root, f"{NODES}/node2/memory8/state", "offline")


def no_driver_for_dax(root: Path) -> None:
    (root / "sys/bus/dax/devices/dax1.0/driver").unlink()


def damon_scheme(action: str, *, state: str = "on") -> Change:
    def change(root: Path) -> None:
        daemon = "sys/kernel/mm/damon/admin/kdamonds/0"
        put(root, f"{daemon}/state", state)
        put(root, f"{daemon}/contexts/0/schemes/0/action", action)
        put(root, f"{daemon}/contexts/0/schemes/0/target_nid", "2")

    return change


def automatic_weights(root: Path) -> None:
    folder = "sys/kernel/mm/mempolicy/weighted_interleave"
    for name, text in {"auto": "true", "node0": "9", "node1": "9", "node2": "1"}.items():
        put(root, f"{folder}/{name}", text)


def lost_pages(**counts: int) -> Change:
    def change(root: Path) -> None:
        folder = f"{NODES}/node2/memory_failure"
        for name in ("total", "recovered", "ignored", "failed", "delayed"):
            put(root, f"{folder}/{name}", str(counts.get(name, 0)))
        put(root, "proc/meminfo", f"HardwareCorrupted: {4 * counts['total']} kB")

    return change


def controller(corrected: int, uncorrected: int) -> Change:
    def change(root: Path) -> None:
        folder = "sys/devices/system/edac/mc/mc0"
        for name, text in {
            "mc_name": "Skylake Socket#0 IMC#0",
            "ce_count": str(corrected),
            "ue_count": str(uncorrected),
            "dimm0/dimm_label": "CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
            "dimm0/dimm_ce_count": str(corrected),
            "dimm0/dimm_ue_count": str(uncorrected),
            "dimm1/dimm_label": "a sound one",
            "dimm1/dimm_ce_count": "0",
        }.items():
            put(root, f"{folder}/{name}", text)

    return change


def link_errors(kind: str, total: str, count: int) -> Change:
    """Of the first card behind the CXL node, as the kernel writes them."""
    text = f"Undefined 0\nData Link Protocol {count}\n{total} {count}"
    return write(f"sys/bus/pci/devices/0000:0d:00.0/aer_dev_{kind}", text)


# name, what brings it about on a healthy machine, severity, and the command's first words
CAUSES: list[tuple[str, Change, str, str]] = [
    ("numa-balancing", write("proc/sys/kernel/numa_balancing", "1"), "warning", "sudo sysctl"),
    ("numa-balancing", write("proc/sys/kernel/numa_balancing", "2"), "warning", "sudo sysctl"),
    ("demotion", write("sys/kernel/mm/numa/demotion_enabled", "true"), "warning", "echo false"),
    ("damon", damon_scheme("migrate_cold"), "warning", "echo off"),
    ("damon", damon_scheme("pageout"), "warning", "echo off"),
    ("damon", write("sys/module/damon_reclaim/parameters/enabled", "Y"), "warning", "echo off"),
    ("automatic-weights", automatic_weights, "note", "echo false"),
    ("swap", write("proc/swaps", "Filename\n/dev/sda2 partition 8388604 0 -2"), "warning", "sudo"),
    (
        "thp-never",
        write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
        "warning",
        "echo madvise",
    ),
    ("max-map-count", write("proc/sys/vm/max_map_count", "32768"), "warning", "sudo sysctl"),
    ("strict-overcommit", write("proc/sys/vm/overcommit_memory", "2"), "warning", "sudo sysctl"),
    ("zone-reclaim", write("proc/sys/vm/zone_reclaim_mode", "1"), "warning", "sudo sysctl"),
    ("no-weighted-interleave", write("proc/sys/kernel/osrelease", "6.1.0-9"), "note", "boot"),
    ("old-kernel", write("proc/sys/kernel/osrelease", "5.10.0"), "warning", "boot"),
    ("movable-zone", movable_zone, "error", "sudo daxctl offline-memory dax0.0"),
    ("offline-memory", offline_block, "warning", "sudo daxctl online-memory --no-movable dax0.0"),
    ("unbound-dax", no_driver_for_dax, "warning", "sudo daxctl reconfigure-device"),
    ("far-gpu", gpu_on_the_other_socket, "warning", "run on a GPU of node 1"),
    ("cpuset", status(mems="0-1"), "error", "docker run --cpuset-mems=0-2"),
    ("cgroup-limit", cgroup_of_4_gib, "warning", "docker run --memory"),
    ("placing-refused", status(seccomp=2), "warning", "docker run --cap-add SYS_NICE"),
    (
        "memlock",
        write("proc/self/limits", "Max locked memory         8388608              8388608   bytes"),
        "note",
        "ulimit -l",
    ),
    ("lost-pages", lost_pages(total=2, recovered=2), "warning", "ras-mc-ctl --errors"),
    ("lost-pages", lost_pages(total=3, recovered=2, failed=1), "error", "ras-mc-ctl --errors"),
    (
        "soft-offlined-pages",
        write("proc/meminfo", "HardwareCorrupted:     8 kB"),
        "warning",
        "ras-mc-ctl --errors",
    ),
    ("memory-errors", controller(7, 0), "warning", "ras-mc-ctl --error-count"),
    ("memory-errors", controller(0, 1), "error", "ras-mc-ctl --error-count"),
    (
        "cxl-link-errors",
        link_errors("correctable", "TOTAL_ERR_COR", 9),
        "note",
        "cxl list -M --media-errors",
    ),
    (
        "cxl-link-errors",
        link_errors("nonfatal", "TOTAL_ERR_NONFATAL", 1),
        "error",
        "cxl list -M --media-errors",
    ),
    ("fast-node-full", meminfo(1, free=GIB // 2), "warning", "numastat"),
    ("fast-node-full", meminfo(1, free=GIB // 2, cached=4 * GIB), "note", "sync; echo 1"),
]


def found_in(root: Path) -> dict[str, Hazard]:
    return {hazard.name: hazard for hazard in find_hazards(root)}


def initiator_on_node_1(root: Path) -> None:
    """The tier ldram is node 1 when the process runs there."""
    text = (root / "proc/self/status").read_text()
    put(
        root, "proc/self/status", text.replace("Cpus_allowed_list:\t0-3", "Cpus_allowed_list:\t2-3")
    )


def test_healthy_machine_has_no_hazard(tmp_path: Path) -> None:
    assert find_hazards(healthy(tmp_path / "tree")) == ()


@pytest.mark.parametrize(
    ("name", "cause", "severity", "command"),
    CAUSES,
    ids=[f"{number}-{cause[0]}" for number, cause in enumerate(CAUSES)],
)
def test_hazard_is_found_and_only_it_when_its_cause_is_there(
    tmp_path: Path, name: str, cause: Change, severity: str, command: str
) -> None:
    root = healthy(tmp_path / "tree")
    initiator_on_node_1(root)
    assert find_hazards(root) == ()
    cause(root)
    found = found_in(root)
    assert set(found) == {name}
    hazard = found[name]
    assert hazard.severity == severity
    assert hazard.remedy.startswith(command)
    parsed = subprocess.run(["sh", "-nc", hazard.remedy], check=False, capture_output=True)
    assert parsed.returncode == 0, hazard.remedy
    assert hazard.found
    assert hazard.cost
    assert hazard.source


@pytest.mark.parametrize(
    "cause",
    [
        status(seccomp=2, capabilities=1 << 23),  # a filter, but CAP_SYS_NICE
        status(seccomp=0),
        damon_scheme("stat"),  # it only watches
        damon_scheme("migrate_cold", state="off"),
        write("proc/sys/kernel/osrelease", "6.9.0"),
        write("proc/sys/kernel/osrelease", "7.0"),
        write("proc/sys/vm/max_map_count", "65530"),  # the default, on a small machine
        meminfo(1, free=GIB),
        lost_pages(total=0),
        controller(0, 0),
        link_errors("fatal", "TOTAL_ERR_FATAL", 0),
        write("proc/meminfo", "HardwareCorrupted:     0 kB"),
    ],
)
def test_no_hazard_when_the_setting_is_harmless(tmp_path: Path, cause: Change) -> None:
    root = healthy(tmp_path / "tree")
    cause(root)
    assert find_hazards(root) == ()


def test_errors_are_told_with_their_number_and_their_part(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    lost_pages(total=3, recovered=2, failed=1)(root)
    put(root, "proc/meminfo", "HardwareCorrupted: 20 kB")
    controller(7, 1)(root)
    link_errors("correctable", "TOTAL_ERR_COR", 9)(root)
    found = found_in(root)
    assert found["lost-pages"].found == (
        "node 2: 3 pages (12 KiB) lost to memory errors (2 recovered, 1 failed)"
    )
    assert found["soft-offlined-pages"].found.startswith("8 KiB of pages")
    assert "7 corrected and 1 uncorrected errors" in found["memory-errors"].found
    assert "(CPU_SrcID#0_MC#0_Chan#0_DIMM#0)" in found["memory-errors"].found
    assert "CXL node 2 at PCI 0000:0d:00.0" in found["cxl-link-errors"].found


def test_weighted_interleave_is_not_missed_where_the_distribution_brought_it_back(
    tmp_path: Path,
) -> None:
    root = healthy(tmp_path / "tree")
    put(root, "proc/sys/kernel/osrelease", "5.14.0-503.el9")
    assert set(found_in(root)) == {"old-kernel"}
    put(root, "proc/sys/kernel/osrelease", "6.4.0")
    assert set(found_in(root)) == {"no-weighted-interleave"}
    put(root, "sys/kernel/mm/mempolicy/weighted_interleave/node0", "1")
    assert find_hazards(root) == ()


def test_balancing_and_reclaim_do_not_matter_on_one_node(tmp_path: Path) -> None:
    root = copy_of("one_node", tmp_path / "tree")
    before = set(found_in(root))
    put(root, "proc/sys/kernel/numa_balancing", "1")
    put(root, "proc/sys/vm/zone_reclaim_mode", "1")
    put(root, "sys/kernel/mm/numa/demotion_enabled", "true")
    assert set(found_in(root)) == before


def test_movable_zone_without_a_gpu_is_a_warning(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    movable_zone(root)
    shutil.rmtree(root / "sys/bus/pci")
    assert found_in(root)["movable-zone"].severity == "warning"


def test_movable_zone_without_a_dax_device_names_the_blocks(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    movable_zone(root)
    shutil.rmtree(root / "sys/bus/dax")
    remedy = found_in(root)["movable-zone"].remedy
    assert f"/{NODES}/node2/memory*/state" in remedy
    assert "online_kernel" in remedy


def test_default_map_count_is_a_note_on_a_large_machine(tmp_path: Path) -> None:
    tree = TreeWriter(tmp_path, hostname="large")
    tree.node_lists(online="0", possible="0", has_cpu="0", has_memory="0")
    tree.node(0, cpus="0-3", total_bytes=1024 * GIB, free_bytes=900 * GIB, distance=(10,))
    tree.file("proc/sys/vm/max_map_count", 65530)
    tree.process(cpus="0-3", mems="0", memlock="unlimited")
    assert {name: h.severity for name, h in found_in(tmp_path).items()} == {"max-map-count": "note"}


def test_worst_comes_first(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    movable_zone(root)
    put(root, "proc/sys/kernel/osrelease", "6.1.0")
    put(root, "proc/sys/kernel/numa_balancing", "1")
    ranks = [SEVERITIES.index(hazard.severity) for hazard in find_hazards(root)]
    assert ranks == sorted(ranks) == [0, 1, 2]


def test_what_was_tried_replaces_the_guess(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    status(seccomp=2)(root)
    assert find_hazards(root, tried=True) == ()
    (hazard,) = find_hazards(root, tried=True, placing_refused="mbind: Operation not permitted")
    assert (hazard.name, hazard.severity) == ("placing-refused", "error")
    assert "mbind: Operation not permitted" in hazard.found


def test_folder_without_sys_and_proc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_hazards(tmp_path)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout


def test_command_prints_json_that_says_the_same(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    movable_zone(root)
    code, out = run("--json", "--sysfs", str(root))
    assert code == 0
    made = json.loads(out)
    assert made["version"] == 1
    assert [Hazard(**row) for row in made["hazards"]] == list(find_hazards(root))


def test_command_fails_only_when_strict_and_worse_than_a_note(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    assert run("--strict", "--sysfs", str(root))[0] == 0
    put(root, "proc/sys/kernel/osrelease", "6.1.0")
    assert run("--strict", "--sysfs", str(root))[0] == 0
    movable_zone(root)
    assert run("--sysfs", str(root))[0] == 0
    assert run("--strict", "--sysfs", str(root))[0] == 1


def test_command_prints_finding_cost_and_remedy_within_the_terminal(tmp_path: Path) -> None:
    root = healthy(tmp_path / "tree")
    put(root, "proc/sys/kernel/numa_balancing", "1")
    _, out = run("--sysfs", str(root))
    assert "sudo sysctl -w kernel.numa_balancing=0" in out
    assert max(map(len, out.splitlines())) <= 100


def test_command_looks_at_this_machine_and_really_places_a_page() -> None:
    code, out = run("--json")
    assert code == 0
    names = [row["name"] for row in json.loads(out)["hazards"]]
    assert "placing-refused" not in names  # the memory tests of this suite need it to work
