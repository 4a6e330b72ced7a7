"""Whose profile ``cxl-offload plan`` takes for a machine that is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cxl_offload.profile import save_profile
from cxl_offload.profile.measure.probe import Quality
from cxl_offload.profile.model import NodeFacts, PathProfile
from cxl_offload.topology import load_machine
from tests.profile.test_profile import profile_of

from .test_options import PLAN, run


def test_profile_of_a_machine_with_other_nodes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    save_profile(profile_of(()), file)
    code, out, error = run(*PLAN, "--profile", str(file))
    assert (code, out) == (2, "")
    assert (
        "was measured on a machine with node 0 (dram); epyc9354-cxl-a has node 0 (dram)," in error
    )
    assert "leave --machine or --profile out" in error


def test_profile_of_a_machine_with_its_nodes_is_taken(tmp_path: Path) -> None:
    """Its processor may be called otherwise, and a file may count CPUs without second threads."""
    machine, made = load_machine("epyc9354-cxl-a"), profile_of(())
    facts = tuple(NodeFacts(node.id, node.kind.value, 1, 1 << 30) for node in machine.nodes)
    file = tmp_path / "profile.json"
    save_profile(replace(made, machine=replace(made.machine, nodes=facts)), file)
    assert run(*PLAN, "--profile", str(file))[0] == 0


def test_plan_says_that_its_profile_was_measured_on_a_busy_machine(tmp_path: Path) -> None:
    machine, made = load_machine("epyc9354-cxl-a"), profile_of(())
    facts = tuple(NodeFacts(node.id, node.kind.value, 1, 1 << 30) for node in machine.nodes)
    quiet = PathProfile(initiator=0, node=0, cpus=(0,), working_set_bytes=1 << 20)
    note = Quality(windows=9, disturbed=2).note()
    assert note is not None
    busy = replace(quiet, node=2, notes=("not measured, the time was over: mixes", note))
    file = tmp_path / "profile.json"
    asked = [*PLAN, "--profile", str(file)]
    for paths, said in (((quiet,), False), ((quiet, busy), True)):
        save_profile(replace(made, machine=replace(made.machine, nodes=facts), paths=paths), file)
        text = " ".join(run(*asked)[1].split())
        assert ("was measured on a busy machine, and memory may be faster" in text) == said
        assert ("other work was using the CPUs (CPUs -> memory: 0 -> 2)." in text) == said
