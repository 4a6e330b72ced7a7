"""Inside a machine with three nodes: cgroups, cpusets and a user without privileges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload.memory import Bind, Interleave, Preferred, Session, Weighted
from cxl_offload.topology import discover
from tests.placement.child import MIB, run_in_child, stranger_filling
from tests.placement.kernel_calls import PAGE, available_bytes, oom_kills, page_nodes
from tests.placement.test_policies import expected_nodes
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
CGROUPS = Path("/sys/fs/cgroup")
NOBODY = 65534
LAST = SPEC.node_ids[-1]
STRIPE = Weighted({0: 4, 1: 2, LAST: 1}, granule_bytes=64 << 10)


@contextlib.contextmanager
def cgroup(**limits: str) -> Iterator[Path]:
    """A group with these limits, e.g. ``memory_max``; the caller's child joins it."""
    (CGROUPS / "cgroup.subtree_control").write_text("+memory +cpuset")
    group = CGROUPS / "limited"
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name.replace("_", ".", 1)).write_text(value)
        yield group
    finally:
        group.rmdir()


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _oom_events(group: Path) -> dict[str, int]:
    lines = (group / "memory.events").read_text().splitlines()
    return {name: int(value) for name, value in map(str.split, lines) if "oom" in name}


def test_cgroup_that_is_too_small_is_named_and_kills_nobody() -> None:
    with cgroup(memory_max=str(192 * MIB)) as group:

        def child() -> None:
            _join(group)
            session = Session.linux()
            limits = session.machine.limits
            assert limits.cgroup_max_bytes == 192 * MIB
            small = session.allocate(64 * MIB, Bind((LAST,)))
            assert set(page_nodes(small.address, small.nbytes)) == {LAST}
            for policy in (Bind((0,)), Preferred((LAST, 1, 0)), Interleave((0, LAST))):
                with pytest.raises(MemoryError, match=r"cgroup /limited memory\.max"):
                    session.allocate(160 * MIB, policy)
                assert session.stats().mapped_bytes.current == small.nbytes
            more = session.allocate(64 * MIB, Interleave((0, LAST)))
            assert sum(more.bytes_per_node().values()) == 64 * MIB

        run_in_child(child)
        assert set(_oom_events(group).values()) == {0}


def test_node_outside_the_cpuset_is_refused_and_never_spilled_to() -> None:
    with cgroup(cpuset_mems=f"0,{LAST}") as group:

        def child() -> None:
            _join(group)
            machine = discover()
            assert [n.id for n in machine.nodes if n.has_memory and not n.allowed] == [1]
            assert all(1 not in tier.nodes for tier in machine.tiers)
            session = Session.linux(machine)
            assert session.kernel.allowed_nodes == [0, LAST]
            for policy in (Bind((1,)), Bind((0, 1)), STRIPE):
                with pytest.raises(ValueError, match="node 1 has no memory that this process may"):
                    session.allocate(MIB, policy)
            striped = Weighted({0: 1, LAST: 3}, granule_bytes=PAGE)
            block = session.allocate(MIB, striped)
            assert page_nodes(block.address, MIB) == expected_nodes(striped, MIB)
            with stranger_filling(LAST, leave_bytes=128 * MIB):
                nbytes = (available_bytes(LAST) + 128 * MIB) // PAGE * PAGE
                spilled = session.allocate(nbytes, Preferred((LAST,)))
                assert set(page_nodes(spilled.address, nbytes)) == {0, LAST}

        kills = oom_kills()
        run_in_child(child)
        assert oom_kills() == kills


def test_everything_works_without_privileges() -> None:
    def child() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        session = Session.linux()
        for policy in (Bind((LAST,)), Preferred((1,)), Interleave((0, LAST)), STRIPE):
            block = session.allocate(28 * MIB, policy)
            assert page_nodes(block.address, block.nbytes) == expected_nodes(policy, block.nbytes)
            session.move(block, Bind((1,)))
            assert set(page_nodes(block.address, block.nbytes)) == {1}
            del block
        session.trim()
        assert session.stats().mapped_bytes.current == 0

    run_in_child(child)
