"""Processes whose memory breaks: who asked for it lives, and nobody else is kept from ending."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
    )


PRELUDE = """
import ctypes, mmap
from cxl_offload.memory import Session, survive_memory_errors
from tests.memory.failures import lose
block = Session.linux().allocate(1 << 20, "bind:0")
"""


def test_process_that_does_not_ask_is_ended_by_lost_memory() -> None:
    assert ran(PRELUDE + "lose(block.address)").returncode == -signal.SIGBUS


def test_process_that_asks_lives_and_is_told_once() -> None:
    done = ran(
        PRELUDE
        + """
with survive_memory_errors():
    try:
        lose(block.address + 5000)
        for _ in range(100): pass
    except RuntimeError as error:
        print(type(error).__name__, error)
    for _ in range(100): pass
"""
    )
    assert done.returncode == 0, done.stderr
    named = "bytes 4096 to 8191 of an allocation of 1 MiB (bind to nodes {0}) on node 0"
    assert named in done.stdout
    assert done.stdout.startswith("MemoryLostError")


def test_process_that_a_thread_asks_for_lives_and_nobody_is_interrupted() -> None:
    done = ran(
        PRELUDE
        + """
import os, threading
asks = threading.Thread(target=survive_memory_errors)
asks.start(); asks.join()
# In a call that lets go of Python: its own handler of a signal without a function would crash.
ctypes.CDLL(None).memset(ctypes.c_void_p(block.address), 7, 1)
lose(block.address)
for _ in range(100): pass
print(ctypes.string_at(block.address, 2))
survive_memory_errors()  # in the main thread: from now on it is interrupted
try:
    lose(block.address + 8192)
    for _ in range(100): pass
except RuntimeError as error:
    print(type(error).__name__)
"""
    )
    assert (done.returncode, done.stdout) == (0, "b'\\xff\\xff'\nMemoryLostError\n"), done.stderr


@pytest.mark.parametrize("after", ["ctypes.string_at(0x10000 + other)", "lose(other)"])
def test_memory_of_others_still_ends_the_process(after: str) -> None:
    done = ran(
        PRELUDE
        + f"""
import os
survive_memory_errors()
file = os.memfd_create("short"); os.ftruncate(file, 1 << 20)
mapping = mmap.mmap(file, 1 << 20)
other = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
os.ftruncate(file, 0)
{after}
"""
    )
    assert done.returncode == -signal.SIGBUS


def test_traceback_of_faulthandler_comes_for_memory_of_others() -> None:
    done = ran(
        "import faulthandler; faulthandler.enable()\n"
        + PRELUDE
        + "survive_memory_errors()\nlose(id(lose))"
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_memory_given_back_to_the_kernel_is_watched_no_more() -> None:
    done = ran(
        PRELUDE
        + """
session = Session.linux()
other = session.allocate(64 << 20, "bind:0")
address = other.address
survive_memory_errors(interrupt=False)
lose(address)
del other
session.trim()
print("lived", flush=True)
lose(address)
"""
    )
    assert done.stdout == "lived\n"
    assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize(("variable", "expected"), [(None, True), ("0", False), ("1", True)])
def test_processes_of_run_survive_unless_they_are_told_not_to(
    variable: str | None, expected: bool
) -> None:
    root = Path(__file__).parents[2]
    autostart = root / "cxl_offload" / "integrations" / "autostart"
    name = "CXL_OFFLOAD_SURVIVE_MEMORY_ERRORS"
    environment = {
        **{key: value for key, value in os.environ.items() if key != name},
        "PYTHONPATH": f"{autostart}:{root}",
        "CXL_OFFLOAD_PLAN": "",
        **({} if variable is None else {name: variable}),
    }
    code = "import cxl_offload.memory.lost as lost; raise SystemExit(lost.survives())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=600)
    assert done.returncode == expected
