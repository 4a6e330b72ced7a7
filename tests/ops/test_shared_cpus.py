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

def work(regions=150):
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(regions):
        large.add_(1)
        time.sleep(0.002)
    return {"cpu_s": time.process_time() - cpu, "s": time.perf_counter() - began}

def threads():
    return len(os.listdir("/proc/self/task"))

work()
found = {"can": _C.can_sleep_in_openmp(), "threads": [threads()], "spins": work()}
for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
    os.environ[name] = "1"
    found[name] = _C.can_sleep_in_openmp()
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
found["threads"].append(threads())

child = os.fork()
if child == 0:
    with share_cpus() as shared:
        os._exit(0 if shared.sleeping_seconds == 0 and threads() == 1 else 1)
with share_cpus():
    kept = os.fork()
    if kept == 0:
        gc.collect()
        os._exit(0 if threads() == 1 else 1)
found["children"] = [os.waitpid(each, 0)[1] for each in (child, kept)]

if os.getuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    _C.SleepingWaits()
except OSError as error:
    found["refused"] = str(error)
with share_cpus() as shared:
    found["without threads"] = shared.sleeping_seconds
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
    if not result["can"]:
        pytest.skip("OpenMP is not GNU's here, or there is one CPU")
    return result


def test_waiting_threads_sleep_and_spin_again(found: Any) -> None:
    """A thread that spins uses its CPU between two regions."""
    assert found["sleeps"]["cpu_s"] < 0.7 * found["spins"]["cpu_s"]
    assert found["sleeps"]["cpu_s"] < 0.7 * found["spins again"]["cpu_s"]


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
    assert "no further thread could be made" in found["refused"]
    assert found["without threads"] == 0


def test_environment_has_the_last_word(found: Any) -> None:
    assert not found["OMP_WAIT_POLICY"]
    assert not found["GOMP_SPINCOUNT"]


def test_little_of_the_time_is_not_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    with share_cpus() as shared:
        monkeypatch.setattr(SharedCpus, "_now", lambda self: (10.0, 0.49))
        assert shared.notes() == ()
        monkeypatch.setattr(SharedCpus, "_now", lambda self: (10.0, 0.51))
        assert shared.notes() == (
            "other programs wanted this one's CPUs for 0.5 of 10.0 s, so it was slower than on a "
            "quiet machine",
        )


@pytest.mark.skipif("OMP_WAIT_POLICY" not in os.environ, reason="threads of these tests may spin")
def test_nothing_is_watched_where_waiting_threads_sleep_already() -> None:
    before = len(os.listdir("/proc/self/task"))
    assert not _C.can_sleep_in_openmp()
    with share_cpus():
        assert len(os.listdir("/proc/self/task")) == before
