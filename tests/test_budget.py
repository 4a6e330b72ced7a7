"""The budget of tests itself, in runs of pytest of their own."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .conftest import LONGEST, pytest_ignore_collect

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


@pytest.mark.slow(reason="runs pytest in processes of its own")
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


MANY_CASES = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(6))
def test_of_many(case): pass
@pytest.mark.parametrize("case", range(6))
def test_of_all(case): pass
"""


@pytest.mark.parametrize(("words", "ran"), [("not slow", 8), ("slow", 4), ("", 12)])
def test_of_a_sampled_test_some_cases_run_and_the_others_with_the_slow_ones(
    pytester: pytest.Pytester, words: str, ran: int
) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n slow: as here\n sampled: as here\n")
    pytester.makepyfile(MANY_CASES)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", "-m", words)
    result.assert_outcomes(passed=ran, deselected=12 - ran)
    if words == "not slow":
        result.stdout.fnmatch_lines(["*test_of_many[[]0[]]*", "*test_of_many[[]3[]]*"])


@pytest.mark.parametrize(("left_s", "outcome"), [(3600, "passed"), (-1, "skipped")])
def test_no_test_begins_when_the_time_of_the_run_is_over(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, left_s: float, outcome: str
) -> None:
    told = pytester.path / "left_out"
    monkeypatch.setenv("CXL_OFFLOAD_LEFT_OUT_FILE", str(told))
    monkeypatch.setenv("CXL_OFFLOAD_TESTS_UNTIL", str(time.time() + left_s))
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = slow: as here\n")
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rs")
    result.assert_outcomes(**{outcome: 1})
    assert told.exists() == (outcome == "skipped")
    if outcome == "skipped":
        result.stdout.fnmatch_lines(["*NOT RUN: the time that CXL_OFFLOAD_TESTS_UNTIL gives*"])
        (line,) = told.read_text().splitlines()
        assert line.startswith("NOT RUN, the time of the run was over: 1 tests, of test_no_test")
        assert line.endswith(".py (1)")
        result.stdout.fnmatch_lines([line.replace("[", "[[]")])


def order_of_files(pytester: pytest.Pytester, *options: str) -> list[str]:
    """In which a run began the tests of its files, if one process takes them all."""
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v", *options)
    result.assert_outcomes(passed=7)
    lines = [line for line in result.stdout.lines if "PASSED" in line]
    names = [re.sub(r".*?(test_\w+)\.py.*", r"\1", line) for line in lines]
    return list(dict.fromkeys(names))


@pytest.mark.slow(reason="runs pytest in processes of its own")
def test_processes_begin_with_the_longest_files_then_with_those_of_most_tests(
    pytester: pytest.Pytester,
) -> None:
    """Which a scheduler of files keeps only with the option that the Makefile gives it."""
    pytest.importorskip("xdist")
    source = Path(__file__).with_name("conftest.py").read_text()
    first = LONGEST[0]
    assert f'"{first}"' in source
    pytester.makeconftest(source.replace(f'"{first}"', '"test_long.py"'))
    pytester.makeini("[pytest]\nmarkers = slow: as here\n")
    each = "import pytest\n@pytest.mark.parametrize('at', range({}))\ndef test(at): pass\n"
    pytester.makepyfile(
        test_a_few=each.format(2), test_long=each.format(1), test_many=each.format(4)
    )
    shared = ("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    assert "--no-loadscope-reorder" in (Path(__file__).parents[1] / "Makefile").read_text()
    assert order_of_files(pytester, *shared) == ["test_long", "test_many", "test_a_few"]
    assert order_of_files(pytester) == ["test_a_few", "test_long", "test_many"]


def test_the_longest_files_are_there() -> None:
    here = Path(__file__).parent
    assert [name for name in LONGEST if not (here / name).is_file()] == []


@pytest.mark.parametrize(("asked", "left_out"), [("not slow", True), ("slow", None), ("", None)])
def test_slow_rooms_are_left_out_only_where_no_slow_test_is_asked_for(
    asked: str, left_out: bool | None
) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=asked))
    here = Path(__file__).parent
    assert pytest_ignore_collect(here / "integrations" / "vllm", config) is left_out
    assert pytest_ignore_collect(here / "integrations", config) is None
    assert pytest_ignore_collect(here.parent / "vm", config) is None
