"""The budget of every test: one that takes more than ten seconds has to say so, with a mark."""

from __future__ import annotations

import collections
import functools
import gc
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest

BUDGET_SECONDS = 10.0

PATIENCE = float(os.environ.get("CXL_OFFLOAD_TEST_PATIENCE", "1"))
"""Multiplies the budget, for machines that are slower than most."""

BUSY_PATIENCE = 2.0
"""Multiplies it too where other programs use the machine, and its caches and cores."""

TESTS_UNTIL = float(os.environ.get("CXL_OFFLOAD_TESTS_UNTIL", "inf"))
"""In seconds of ``time.time()``: no test begins later. CI sets it, whose time is limited."""

LEFT_OUT = "NOT RUN"
"""What is said of the tests that would have begun later."""

LEFT_OUT_FILE = os.environ.get("CXL_OFFLOAD_LEFT_OUT_FILE")
"""Where it is said too, a line for each run of pytest: CI reads it for its last lines."""

SEED = os.environ.get("CXL_OFFLOAD_TEST_SEED", "0")
"""Random numbers of a test depend on this and its name alone, so that one that failed fails again.
A tolerance that only holds for most numbers is found by running the tests with other seeds."""

# A shell has these ignored in what it starts in the background, and so they would be in every
# program that a test starts and interrupts.
for _each, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_each) is signal.SIG_IGN:
        signal.signal(_each, _default)

# OpenMP's waiting threads sleep, since the processes that share the tests want their cores; and no
# report says that other programs did. Before anything loads torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until all tests are collected: there is little to find in what imports make

# What takes SIGBUS by itself would keep it for all tests after it. A test that wants it says so.
os.environ["CXL_OFFLOAD_SURVIVE_MEMORY_ERRORS"] = "0"

SLOW_ROOMS = {
    "examples": "trains and serves models",
    "gpu": "runs where a GPU is",
    "integrations/deepspeed": "starts the real DeepSpeed in processes of its own",
    "integrations/vllm": "starts the real vLLM in processes of its own",
    "vm": "boots machines",
}
"""Rooms whose tests are marked slow as a whole, and why."""

LONGEST = (
    "packaging/test_wheel.py",
    "examples/test_demo.py",
    "examples/test_train_gpt.py",
    "integrations/transformers/test_ranks.py",
    "integrations/flexgen/test_plan_realised.py",
    "integrations/transformers/test_hooks_of_others.py",
    "plan/test_same_plans.py",
    "ops/test_checkpoint_ranks.py",
    "integrations/test_run_deepspeed.py",
    "integrations/test_activations_deepspeed.py",
    "integrations/transformers/test_memory_while_loading.py",
    "integrations/test_run_plan.py",
    "integrations/test_run.py",
    "plan/test_bounds_everywhere.py",
    "integrations/transformers/test_recipes.py",
    "soak/test_rounds.py",
    "cli/test_json_keys.py",
    "integrations/transformers/test_lost_memory.py",
    "integrations/flexgen/test_against_stock.py",
    "faults/test_fork.py",
    "faults/test_exit.py",
)
"""Files of many seconds and few tests, about the longest first. Where processes share the tests,
each takes the next file as it becomes free: these begin first, so that none of them ends alone."""

# Processor seconds of this process and of children it waited for: other programs do not count.
_STARTED = pytest.StashKey[float]()


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _survives_memory_errors() -> bool:
    lost = sys.modules.get("cxl_offload.memory.lost")
    return lost is not None and bool(lost.survives())


def _place(item: pytest.Item) -> str:
    root = Path(__file__).parent
    return item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out slow rooms where their tests are not asked for: they import what few others do."""
    root = Path(__file__).parent
    if config.option.markexpr != "not slow" or not collection_path.is_relative_to(root):
        return None
    return collection_path.relative_to(root).as_posix() in SLOW_ROOMS or None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Marks what is slow; a process that shares the tests begins with the longest."""
    for item in items:
        place = _place(item)
        for name, why in SLOW_ROOMS.items():
            if place.startswith(f"{name}/"):
                item.add_marker(pytest.mark.slow(reason=why))
    leave_samples(items)
    yield
    if hasattr(config, "workerinput"):
        begin_with_the_longest(items)


def leave_samples(items: list[pytest.Item]) -> None:
    """Marks slow all but some cases of each test that is ``sampled(count)``, evenly spread.

    With two parameters take a count that meets the values of both: 10 of 10 x 3 cases would always
    have the same one of the three, 11 have all.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        (count,) = alike[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        kept = {at * len(alike) // count for at in range(count)}
        for at, item in enumerate(alike):
            if at not in kept:
                item.add_marker(pytest.mark.slow(reason="one of many cases, of which some run"))


def begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Sorts the files of a run: those of ``LONGEST``, then those of the most tests."""
    tests = collections.Counter(map(_place, items))
    rank = {name: at - len(LONGEST) for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (rank.get(_place(item), 0), -tests[_place(item)]))


def keep_from_collections() -> None:
    """Keeps what is there out of every later collection, which then takes no third of a second.

    Many tests collect to see that nothing is left; what they look for is made after this.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    nextitem: pytest.Item | None, item: pytest.Item
) -> Generator[None, None, None]:
    """What the tests of a file imported stays: one file collected over it for a minute."""
    yield
    if nextitem is None or nextitem.path != item.path:
        keep_from_collections()


def pytest_collection_finish() -> None:
    """What imports made stays."""
    gc.enable()
    keep_from_collections()
    if (runner := sys.modules.get("typer.testing")) is not None:
        # It builds the commands of an app anew at each of its calls, of which there are hundreds:
        # 30 ms for the whole command line. Commands keep nothing from one call to the next.
        runner._get_command = functools.cache(runner._get_command)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out the tests that are left when the time of the run is over; seeds the others."""
    if time.time() > TESTS_UNTIL:
        pytest.skip(f"{LEFT_OUT}: the time that CXL_OFFLOAD_TESTS_UNTIL gives is over")
    seed = zlib.crc32(f"{SEED} {item.nodeid}".encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests were left out, and of which files."""
    skipped = terminalreporter.getreports("skipped")
    said = what_was_left_out([each.nodeid for each in skipped if LEFT_OUT in str(each.longrepr)])
    if said:
        terminalreporter.write_line(said)
        if LEFT_OUT_FILE is not None:
            with open(LEFT_OUT_FILE, "a", encoding="utf-8") as kept:
                kept.write(f"{said}\n")


def what_was_left_out(names: list[str]) -> str:
    """One line: every file that has such tests, and how many; empty where there are none."""
    if not names:
        return ""
    files = collections.Counter(name.partition("::")[0] for name in names)
    listed = ", ".join(f"{file} ({count})" for file, count in files.items())
    return f"{LEFT_OUT}, the time of the run was over: {len(names)} tests, of {listed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a call that passed, but took longer than its budget, and who leaves SIGBUS changed."""
    report = yield
    if call.when == "teardown" and report.passed and _survives_memory_errors():
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} began survive_memory_errors() and did not stop it"
    if call.when == "setup":
        item.stash[_STARTED] = _processor_seconds()
    elif call.when == "call" and report.passed and item.get_closest_marker("slow") is None:
        taken, most = call.duration, BUDGET_SECONDS * PATIENCE
        if os.getloadavg()[0] > (os.cpu_count() or 1):
            # The clock counts what others do in the meantime, the processor only this test.
            taken = min(taken, _processor_seconds() - item.stash[_STARTED])
            most *= BUSY_PATIENCE
        if taken > most:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {taken:.1f} s of at most {most:g} s; make it "
                "smaller, or mark it slow and say why"
            )
    return report
