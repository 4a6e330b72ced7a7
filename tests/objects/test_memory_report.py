"""Who holds the host memory: sums against the kernel's own files, owners against what was made."""

from __future__ import annotations

import gc
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import cxl_offload
from cxl_offload import Session, load_machine, memory_report
from cxl_offload.cli.main import main
from cxl_offload.errors import CxlOffloadError
from cxl_offload.objects import MemoryReport, report_of_process
from cxl_offload.objects.mapped_ranges import cached_bytes, read_mapped_ranges
from cxl_offload.units import MIB


def rollup(pid: str = "self") -> dict[str, int]:
    """The kernel's own sum over all mappings, which the package does not read."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def held(report: MemoryReport, owner: str) -> int:
    return sum(each.resident_bytes for each in report.holders if each.owner == owner)


class Net(nn.Module):
    """16 MiB of parameters, 8 MiB of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))
        self.register_buffer("table", torch.ones(2, MIB))


@pytest.fixture
def trained() -> tuple[Net, torch.optim.Optimizer]:
    gc.collect()
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    sum(layer(torch.ones(1, 1024)).sum() for layer in net.layers).backward()
    optimizer.step()
    return net, optimizer


def test_sums_are_those_of_the_kernel(trained: tuple[Net, torch.optim.Optimizer]) -> None:
    memory_report()  # what it takes itself is there from now on
    before = rollup()["Rss"]
    report = memory_report()
    after = rollup()["Rss"]
    least, most = 0.99 * min(before, after), 1.01 * max(before, after)
    assert least <= report.resident_bytes <= most
    assert least <= sum(report.nodes().values()) <= most


@pytest.mark.usefixtures("trained")
def test_owners_have_what_was_made_for_them() -> None:
    report = memory_report()
    made = {"parameters": 16, "buffers": 8, "gradients": 16, "optimizer states": 32}
    found = {
        owner: sum(
            each.nbytes
            for each in report.tensors
            if each.owner == owner and each.name.split(".")[0] in ("Net", "Adam")
        )
        for owner in made
    }
    for owner, size in made.items():
        assert found[owner] == pytest.approx(size * MIB, rel=0.01), owner
        assert held(report, owner) >= 0.99 * size * MIB
    assert any(each.name == "Net.layers.3.weight" for each in report.tensors)


def test_growth_names_the_owner() -> None:
    before = memory_report()
    kept = torch.ones(24 * MIB // 4)
    growth = memory_report().growth_since(before)
    assert growth["other tensors"] == pytest.approx(24 * MIB, rel=0.02)
    assert next(iter(growth)) == "other tensors"
    del kept


def test_memory_that_was_not_touched_counts_nothing() -> None:
    before = memory_report().resident_bytes
    # Fresh from the kernel: torch.empty() may give what others in this process touched and freed.
    kept = torch.frombuffer(mmap.mmap(-1, 256 * MIB), dtype=torch.float32)
    report = memory_report()
    assert report.resident_bytes - before < 8 * MIB
    (found,) = (each for each in report.tensors if each.nbytes == 256 * MIB)
    assert sum(found.nodes.values()) <= 2 * MIB  # a byte that somebody looked at may be a huge page
    del kept


def test_tensors_that_lost_their_place_are_named() -> None:
    session = Session.linux()
    net = Net()
    for layer in net.layers:
        placed = cxl_offload.from_tensor(layer.weight, policy="bind:0", session=session)
        layer.weight = nn.Parameter(placed)
    assert not memory_report(session=session).strays
    net.layers[2].weight = nn.Parameter(net.layers[2].weight.double())
    (stray,) = memory_report(session=session).strays
    assert stray.startswith("Net.layers.2.weight (8 MiB) is not placed, while 3 of 4 parameters")


def test_pools_say_what_they_keep() -> None:
    session = Session.linux()
    block = cxl_offload.zeros(8 * MIB, policy="bind:0", session=session)
    assert memory_report(session=session).unused_pool_bytes == 0
    del block
    assert memory_report(session=session).unused_pool_bytes >= 32 * MIB


def test_other_processes_are_asked_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    program = """
import sys
kept = bytearray(b"x" * (40 << 20))
print("ready", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        report = report_of_process(child.pid)
        kernel = rollup(str(child.pid))
        with pytest.raises(SystemExit) as ended:
            main(["memory", str(child.pid), "--json"])
        child.communicate(b"")
    assert report.resident_bytes == pytest.approx(kernel["Rss"], rel=0.01)
    assert held(report, "other anonymous memory") >= 40 * MIB
    assert held(report, "programs and libraries") > MIB
    shown = json.loads(capsys.readouterr().out)
    assert ended.value.code in (0, None)
    assert shown["resident_bytes"] == pytest.approx(kernel["Rss"], rel=0.01)
    with pytest.raises(CxlOffloadError, match="there is none of this number"):
        report_of_process(child.pid)


def test_kernel_threads_have_no_memory() -> None:
    if os.getuid() != 0 or not Path("/proc/2/smaps").exists():
        pytest.skip("needs root, and to see the kernel's threads")
    with pytest.raises(CxlOffloadError, match="process 2 has no memory"):
        report_of_process(2)


def test_files_of_weights_are_told_with_their_page_cache(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"w" * (6 * MIB))
    assert cached_bytes(weights) == 6 * MIB
    assert cached_bytes(tmp_path / "none") == 0
    before = held(memory_report(), "mapped checkpoints")  # of tests before this one
    with open(weights, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[:] == b"w" * (6 * MIB)
        report = memory_report()
        assert report.cached_files[str(weights)] == 6 * MIB
        assert held(report, "mapped checkpoints") == before + 6 * MIB
        mapped.close()


def test_captures_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "proc" / "7"
    folder.mkdir(parents=True)
    fields = "Rss: 4096 kB\nPss: 2048 kB\nAnonHugePages: 2048 kB\nLocked: 8 kB\nSwap: 16 kB\n"
    pool = "Rss: 0 kB\nPss: 0 kB\nPrivate_Hugetlb: 2048 kB\n"
    (folder / "smaps").write_text(
        f"7f0000000000-7f0000800000 rw-p 00000000 00:00 0 \n{fields}VmFlags: rd wr mr mw me ac\n"
        f"7f0000800000-7f0000a00000 rw-s 00000000 00:0f 9  /anon_hugepage (deleted)\n{pool}"
    )
    (folder / "numa_maps").write_text(
        "7f0000000000 bind:2 anon=1024 dirty=1024 N0=256 N2=768 kernelpagesize_kB=4\n"
        "7f0000800000 default file=/anon_hugepage\\040(deleted) huge dirty=1 N1=1 "
        "kernelpagesize_kB=2048\n"
    )
    first, second = read_mapped_ranges(7, root=str(tmp_path))
    assert (first.nodes, first.policy) == ({0: MIB, 2: 3 * MIB}, "bind:2")
    assert (first.huge_bytes, first.locked_bytes, first.swapped_bytes) == (2 * MIB, 8192, 16384)
    assert (second.resident_bytes, second.huge_bytes) == (2 * MIB, 2 * MIB)
    assert second.nodes == {1: 2 * MIB}
    owners = {each.owner for each in report_of_process(7, root=str(tmp_path)).holders}
    assert owners == {"anonymous memory placed bind:2", "other anonymous memory"}


def test_nodes_of_a_simulated_session_are_said_to_be_real_ones() -> None:
    simulated = Session.simulated(load_machine("epyc9354-cxl-a"))
    block = cxl_offload.zeros(8 * MIB, policy="bind:2", session=simulated)
    report = memory_report(session=simulated)
    assert report.to_json()["simulated_session"]
    assert "the nodes above are real ones; the session's are simulated" in str(report)
    assert "simulated" not in str(memory_report(session=Session.linux()))
    del block
