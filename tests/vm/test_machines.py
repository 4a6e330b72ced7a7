"""Boots every machine of tests/vm/machines and runs in it what its file lists."""

from __future__ import annotations

import os

import pytest

from tests.vm.harness.guest import REPOSITORY, run_pytest
from tests.vm.harness.machine import load, names
from tests.vm.harness.packages import Assets, find

pytestmark = pytest.mark.vm

# Set by `make test-vm`: boot, and fail where that is not possible.
REQUIRED = os.environ.get("CXL_OFFLOAD_REQUIRE_VM") == "1"
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def assets() -> Assets:
    found = find()
    if isinstance(found, Assets):
        if not REQUIRED:
            pytest.skip("booting every machine takes minutes; `make test-vm` does")
        return found
    if REQUIRED:
        pytest.fail(found)
    pytest.skip(found)


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("machine", names())
def test_guest_passes(machine: str, assets: Assets) -> None:
    spec = load(machine)
    results = REPOSITORY / "out" / "vm" / machine
    outcome = run_pytest(spec, assets, spec.tests, results=results, timeout_s=TIMEOUT_S)
    assert outcome.failures() == ""
