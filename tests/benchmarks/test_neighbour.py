"""The busy neighbour of benchmarks: works when it is told to, ends for sure, and what it costs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.conditions import conditions_of
from benchmarks.neighbour import (
    BESIDE,
    QUIET,
    Neighbour,
    falls_document,
    falls_of,
    falls_table,
)
from benchmarks.results import rows_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = 5 << 20  # no whole number of the pieces that are copied between two looks


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def test_neighbour_works_in_its_blocks_only() -> None:
    with Neighbour(SMALL) as neighbour:
        with neighbour.during(QUIET):
            time.sleep(0.05)
        assert neighbour.bytes_copied == 0
        with neighbour.during(BESIDE):
            assert wait_until(lambda: cpu_s(neighbour.pid) > 0.5, 30)
        did = neighbour.describe()
        assert neighbour.bytes_copied > SMALL
        assert did["copied_bytes_per_s"] == neighbour.bytes_copied / neighbour.seconds
        # Of one CPU; the two clocks of a virtual machine differ a little.
        assert 0 < did["cpu_share"] <= 1.5
        rested = cpu_s(neighbour.pid)
        time.sleep(0.3)
        assert cpu_s(neighbour.pid) - rested < 0.05
        copied = neighbour.bytes_copied
        with neighbour.during(BESIDE):
            time.sleep(0.1)
        assert neighbour.bytes_copied > copied


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_neighbour_ends_where_its_block_is_left_by(failure: type[BaseException]) -> None:
    def fail() -> None:
        with Neighbour(SMALL) as neighbour:
            pids.append(neighbour.pid)
            with neighbour.during(BESIDE):
                raise failure

    pids: list[int] = []
    with pytest.raises(failure):
        fail()
    assert has_ended(pids[0])


BENCHMARK = """
import time
from benchmarks.neighbour import BESIDE, Neighbour
with Neighbour(5 << 20) as neighbour, neighbour.during(BESIDE):
    print(neighbour.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_neighbour_ends_with_a_benchmark_that_a_signal_ends(how: signal.Signals) -> None:
    program = [sys.executable, "-c", BENCHMARK]
    with subprocess.Popen(
        program, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert not has_ended(pid)
        benchmark.send_signal(how)
        assert benchmark.wait(10) != 0
    assert wait_until(lambda: has_ended(pid))


def test_neighbour_that_was_killed_is_told() -> None:
    with Neighbour(SMALL) as neighbour:
        os.kill(neighbour.pid, signal.SIGKILL)
        with (
            pytest.raises(RuntimeError, match="ended by itself, with -9"),
            neighbour.during(BESIDE),
        ):
            pytest.fail("its block was entered")


def test_no_neighbour_is_started_where_none_is_wanted() -> None:
    with conditions_of(argparse.Namespace(neighbour=False)) as conditions:
        assert conditions.names == (QUIET,)
        assert [[*conditions.of_round(number)] for number in (0, 1)] == [[QUIET], [QUIET]]
        assert conditions.document(lambda: pytest.fail("there is nothing to compare")) == {}


@pytest.mark.slow(reason="keeps a CPU busy for seconds")
def test_neighbour_works_for_its_half_of_every_round_which_comes_first_in_every_other() -> None:
    with conditions_of(argparse.Namespace(neighbour=True)) as conditions:
        for number, order in enumerate(((QUIET, BESIDE), (BESIDE, QUIET))):
            worked = []
            for condition in conditions.of_round(number):
                worked.append(condition)
                time.sleep(0.1)
            assert tuple(worked) == order
        (told,) = conditions.document(dict).values()
    assert 0.2 <= told["did"]["seconds"] < 10


STOCK = {QUIET: [1.0, 2.0, 1.0], BESIDE: [2.0, 4.0, 2.0]}
OURS = {QUIET: [0.5, 1.0, 0.5], BESIDE: [1.5, 3.0, 1.5]}
"""Twice as fast alone, and three times as slow beside a neighbour, where stock is twice as slow."""


def test_falls_are_those_of_each_round() -> None:
    found = falls_of(STOCK, OURS)
    assert found.quiet.median == pytest.approx(2)
    assert found.beside.median == pytest.approx(4 / 3)
    assert found.falls.median == pytest.approx(2 / 3)
    assert falls_of(OURS, OURS).falls.median == pytest.approx(1)


def test_table_marks_what_misses_its_bar() -> None:
    told = falls_table({"a case": falls_of(STOCK, OURS), "the same": falls_of(OURS, OURS)})
    _, first, second, _ = told.splitlines()
    assert first.count("!") == 1
    assert "! 0.67" in first
    assert "!" not in second


def test_what_misses_a_bar_is_judged_by_the_lower_end() -> None:
    stock = {QUIET: [1.0] * 8, BESIDE: [1.0] * 8}
    ours = {QUIET: [0.9] * 5 + [1.5] * 3, BESIDE: [0.9] * 8}
    found = falls_of(stock, ours)
    assert found.quiet.median > 1 > found.quiet.low
    _, line, bars = falls_table({"a case": found}).splitlines()
    assert line.count("!") == 1
    assert f"! {found.quiet.median:.2f}" in line
    assert "lower end" in bars


@pytest.mark.parametrize(
    ("benchmark", "others"),
    [
        ("flexgen", {"results": []}),
        ("zero_offload", {"speedup": {}}),
        ("vllm_kv", {"results": {}}),
    ],
)
def test_results_have_rows_beside_a_neighbour(benchmark: str, others: dict[str, object]) -> None:
    with Neighbour(SMALL) as neighbour:
        written = falls_document(neighbour, {"a case": falls_of(STOCK, OURS)})
    beside, fall = rows_of(benchmark, others | {"neighbour": written})
    assert beside.case == fall.case == "a case, beside a neighbour"
    assert beside.ratio == pytest.approx(4 / 3)
    assert not beside.slower
    assert fall.ratio == pytest.approx(2 / 3)
    assert fall.beside.endswith("own fall")
    assert fall.slower
    assert rows_of(benchmark, others) == []
