"""How OpenMP's threads wait, beside other programs and alone: in a process that may spin.

The tests themselves run with ``OMP_WAIT_POLICY=passive``, where nothing is left to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cxl_offload import _C
from cxl_offload.ops import shared_cpus
from cxl_offload.ops.shared_cpus import SharedCpus, share_cpus

ROOT = Path(__file__).resolve().parents[2]
SPINNING = {
    name: value
    for name, value in os.environ.items()
    if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
}
PROGRAM = """
import contextlib, gc, json, os, resource, subprocess, sys, threading, time
import torch
from cxl_offload import _C, share_cpus

torch.set_num_threads(max(2, os.cpu_count()))
large = torch.ones(300, 300)

def of_the_others():
    return time.process_time() - time.thread_time()

# CPU seconds of the threads that wait for this one while it sleeps.
def work(regions=150):
    began = of_the_others()
    for _ in range(regions):
        large.add_(1)
        time.sleep(0.002)
    return of_the_others() - began

def threads():
    return len(os.listdir("/proc/self/task"))

work()
found = {"cannot": _C.why_openmp_cannot_sleep(), "threads": [threads()], "spins": work()}
for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_STACKSIZE"):
    os.environ[name] = "1"
    found[name] = _C.why_openmp_cannot_sleep()
    with share_cpus() as shared:
        found[f"block with {name}"] = shared.why_off
    del os.environ[name]
sleeping = _C.SleepingWaits()
found["sleeps"] = work()
del sleeping
found["spins again"] = work()
found["threads"].append(threads())

others = [
    subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())
]
with share_cpus() as outer:
    before = threads()
    with contextlib.ExitStack() as stack:
        inner = [stack.enter_context(share_cpus()) for _ in range(3)]
        found["one watch"] = threads() == before
        until = time.perf_counter() + 20
        while outer.sleeping_seconds < 0.3 and time.perf_counter() < until:
            work(20)
    found["inner"] = [each.sleeping_seconds for each in inner]
for each in others:
    each.kill()
    each.wait()
found["slept"], found["notes"] = [outer.sleeping_seconds, outer.seconds], outer.notes()
with share_cpus() as quiet:
    found["new"] = quiet.sleeping_seconds
    found["why off"] = [outer.why_off, quiet.why_off]
found["threads"].append(threads())

child = os.fork()
if child == 0:
    with share_cpus() as shared:
        off = shared.why_off == "this process was forked and ran no program since"
        os._exit(0 if off and shared.sleeping_seconds == 0 and threads() == 1 else 1)
with share_cpus():
    kept = os.fork()
    if kept == 0:
        gc.collect()
        os._exit(0 if threads() == 1 else 1)
found["children"] = [os.waitpid(each, 0)[1] for each in (child, kept)]

if os.getuid() == 0:
    os.setuid(65534)
found["refused"] = []
for room in (20, 0):  # enough for OpenMP's threads, not for those of others beside them
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (threads() + room, hard))
    try:
        _C.SleepingWaits()
    except OSError as error:
        found["refused"].append(str(error))
with share_cpus() as shared:
    found["without threads"] = [shared.sleeping_seconds, shared.why_off]
large.add_(1)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**SPINNING, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    if result["cannot"]:
        pytest.skip(result["cannot"])
    return result


def test_waiting_threads_sleep_and_spin_again(found: Any) -> None:
    """A thread that spins uses its CPU between two regions."""
    assert found["sleeps"] < 0.5 * found["spins"]
    assert found["sleeps"] < 0.5 * found["spins again"]


def test_beside_other_programs_they_sleep_and_the_report_says_so(found: Any) -> None:
    slept, seconds = found["slept"]
    assert 0.3 <= slept <= seconds
    (note,) = found["notes"]
    assert note.startswith(
        f"other programs wanted this one's CPUs for {slept:.1f} of {seconds:.1f}"
    )
    assert all(0.2 < each <= slept for each in found["inner"])


def test_a_watch_serves_all_blocks_and_ends_with_the_last(found: Any) -> None:
    assert found["one watch"]
    assert found["new"] == 0
    assert len(set(found["threads"])) == 1


def test_forked_children_have_no_watch_and_end(found: Any) -> None:
    assert found["children"] == [0, 0]


def test_no_further_threads_change_nothing(found: Any) -> None:
    """GNU's OpenMP would end the process."""
    assert ["no further thread could be made" in said for said in found["refused"]] == [True] * 2
    slept, why_off = found["without threads"]
    assert slept == 0
    assert "no further thread could be made" in why_off


def test_environment_has_the_last_word(found: Any) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_STACKSIZE"):
        assert found[name] == found[f"block with {name}"] == f"{name} is set"
    assert found["why off"] == ["", ""]


def test_fewer_threads_than_asked_for_are_no_sleep(found: Any) -> None:
    program = "import torch; from cxl_offload import _C; _C.SleepingWaits()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**SPINNING, "OMP_THREAD_LIMIT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "it makes fewer threads than CPUs and one" in done.stderr


def test_a_block_begins_once_and_says_what_it_saw() -> None:
    block = share_cpus()
    assert (block.seconds, block.sleeping_seconds, block.notes()) == (0, 0, ())
    with block:
        with pytest.raises(RuntimeError, match="has begun already"), block:
            pass
        assert block.seconds > 0
    ended = block.seconds
    block.end()
    assert block.seconds == ended
    if block.why_off:
        assert repr(block) == f"<share_cpus(): does nothing, since {block.why_off}>"
    else:
        assert repr(block) == "<share_cpus(): wanted by others for 0.0 of 0.0 s>"
    with pytest.raises(RuntimeError, match="has begun already"), block:
        pass


def test_no_block_reports_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter((1.0, 0.2, 9.0))
    watch = type("Watch", (), {"sleeping_seconds": property(lambda _: next(seen)), "why_off": ""})
    monkeypatch.setattr(shared_cpus, "_watch", watch)
    with share_cpus() as block:
        assert block.sleeping_seconds == 0  # a forked child counts from nothing
    assert block.sleeping_seconds == block.seconds


def test_little_of_the_time_is_not_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with share_cpus() as shared:
        monkeypatch.setattr(SharedCpus, "_now", lambda self: (10.0, 0.49))
        assert shared.notes() == ()
        monkeypatch.setattr(SharedCpus, "_now", lambda self: (0.0, 0.0))
        assert shared.notes() == ()
        monkeypatch.setattr(SharedCpus, "_now", lambda self: (10.0, 0.51))
        assert shared.notes() == (
            "other programs wanted this one's CPUs for 0.5 of 10.0 s, so it was slower than on a "
            "quiet machine",
        )


@pytest.mark.skipif("OMP_WAIT_POLICY" not in os.environ, reason="threads of these tests may spin")
def test_nothing_is_watched_where_waiting_threads_sleep_already() -> None:
    before = len(os.listdir("/proc/self/task"))
    assert _C.why_openmp_cannot_sleep()
    with share_cpus():
        assert len(os.listdir("/proc/self/task")) == before
