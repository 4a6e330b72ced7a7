"""Whose profile ``cxl-offload plan`` takes for a machine that is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cxl_offload.profile import save_profile
from cxl_offload.profile.model import NodeFacts
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
