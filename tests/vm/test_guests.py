"""Boots every machine and runs its tests inside.

A machine takes a minute or two, so this is done by ``make test-vm`` only, which sets
CXL_OFFLOAD_VM=1. With CXL_OFFLOAD_REQUIRE_VM=1 what is missing is a failure and no reason to skip.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vm.harness.guest import run_pytest
from tests.vm.harness.machine import load
from tests.vm.harness.packages import Assets, find

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        os.environ.get("CXL_OFFLOAD_VM") != "1", reason="boots virtual machines: make test-vm"
    ),
]

# A device is taken off the nodes for good, so what needs the node comes first.
SELECTIONS = {
    "two-sockets-memory-node": ["tests/vm/guest_memory.py"],
    "snc4-memory-node": ["tests/vm/guest_memory.py"],
    "linux-6-1": ["tests/vm/guest_memory.py"],
    "cxl-kernel": ["tests/vm/guest_pinned.py"],
    "cxl-movable": ["tests/vm/guest_pinned.py", "tests/vm/guest_dax.py"],
}


@pytest.mark.parametrize("machine", SELECTIONS)
def test_guest_passes(machine: str, tmp_path: Path) -> None:
    assets = find()
    if not isinstance(assets, Assets):
        if os.environ.get("CXL_OFFLOAD_REQUIRE_VM") == "1":
            pytest.fail(assets)
        pytest.skip(assets)
    results = Path(os.environ.get("CXL_OFFLOAD_VM_RESULTS", tmp_path)) / machine
    outcome = run_pytest(load(machine), assets, SELECTIONS[machine], results=results, timeout_s=400)
    assert outcome.failures() == ""
