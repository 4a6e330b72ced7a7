"""Boots the machines with real CXL memory for the tests of long-term pins and of Device-DAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vm.harness.guest import run_pytest
from tests.vm.harness.machine import load
from tests.vm.harness.packages import Assets, find

pytestmark = pytest.mark.vm

# The device is taken off the nodes for good, so what needs the node comes first.
SELECTIONS = {
    "cxl-kernel": ["tests/vm/guest_pinned.py"],
    "cxl-movable": ["tests/vm/guest_pinned.py", "tests/vm/guest_dax.py"],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", sorted(SELECTIONS))
def test_guest_passes(machine: str, tmp_path: Path) -> None:
    assets = find()
    if not isinstance(assets, Assets):
        pytest.skip(assets)
    outcome = run_pytest(
        load(machine), assets, SELECTIONS[machine], results=tmp_path / machine, timeout_s=400
    )
    assert outcome.failures() == ""
