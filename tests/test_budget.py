"""The budget of tests itself, in runs of pytest of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

BODY = """
import time, pytest

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_short(): spin(0.01)
def test_long(): spin(0.5)
@pytest.mark.slow(reason="it spins")
def test_long_with_a_mark(): spin(0.5)
def test_wrong(): assert False
"""


def test_test_over_its_budget_fails_unless_it_is_marked(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXL_OFFLOAD_TEST_PATIENCE", "1")
    source = Path(__file__).with_name("conftest.py").read_text()
    assert "BUDGET_SECONDS = 10.0" in source
    pytester.makeconftest(source.replace("BUDGET_SECONDS = 10.0", "BUDGET_SECONDS = 0.1"))
    pytester.makeini("[pytest]\nmarkers = slow: as here\n")
    pytester.makepyfile(BODY)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*test_long took 0.* s of at most 0.? s; make it smaller*"])
