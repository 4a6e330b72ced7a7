"""Boots every machine of tests/vm/machines and runs in it what its file lists.

A machine takes a minute or two, so only ``make test-vm`` does it, which sets CXL_OFFLOAD_VM=1.
With CXL_OFFLOAD_REQUIRE_VM=1, as CI has it, what is missing is a failure and no reason to skip.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.harness.guest import run_pytest
from tests.vm.harness.machine import load, names
from tests.vm.harness.packages import Assets, find

REQUIRED = os.environ.get("CXL_OFFLOAD_REQUIRE_VM") == "1"
WANTED = REQUIRED or os.environ.get("CXL_OFFLOAD_VM") == "1"
TIMEOUT_S = 420.0 * float(os.environ.get("CXL_OFFLOAD_TEST_PATIENCE", "1"))

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3 * TIMEOUT_S),
    pytest.mark.skipif(not WANTED, reason="boots virtual machines for minutes: make test-vm"),
]


@pytest.mark.parametrize("machine", names())
def test_guest_passes(
    machine: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    assets = find()
    if not isinstance(assets, Assets):
        if REQUIRED:
            pytest.fail(assets)
        pytest.skip(assets)
    spec = load(machine)
    results = Path(os.environ.get("CXL_OFFLOAD_VM_RESULTS", tmp_path)) / machine
    outcome = run_pytest(spec, assets, spec.tests, results=results, timeout_s=TIMEOUT_S)
    record_property("tests in the guest", len(outcome.cases))
    for name, seconds in zip(("boot_s", "total_s", "cpu_s"), outcome.times, strict=True):
        record_property(name, round(seconds, 1))
    assert outcome.failures() == ""
