"""What a memory group of tests promises: its limit kills who joined it, and nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.placement.memory_group import memory_group

MIB = 1 << 20

# Holds 32 MiB before the limit; then takes as many again as its argument says, and says so.
TAKES = """
import sys
held = bytearray(b"x") * (32 << 20)
print("holds", flush=True)
sys.stdin.readline()
more = bytearray(b"x") * (int(sys.argv[1]) << 20)
print("took", flush=True)
"""


def taker(mib: int) -> list[str]:
    return [sys.executable, "-c", TAKES, str(mib)]


def start(command: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout
    assert process.stdout.readline() == "holds\n"
    return process


def test_limit_kills_who_joined_and_takes_too_much_and_nobody_else() -> None:
    with memory_group() as group:
        inside, bystander = start(group.joined_by(taker(64))), start(taker(64))
        assert (group.folder / "cgroup.procs").read_text().split() == [str(inside.pid)]
        group.leave_bytes(32 * MIB)
        assert bystander.communicate("\n", timeout=60) == ("took\n", None)
        assert (bystander.returncode, group.kills) == (0, 0)
        assert inside.communicate("\n", timeout=60) == ("", None)
        assert (inside.returncode, group.kills) == (-signal.SIGKILL, 1)
    assert not group.folder.exists()


def test_who_stays_below_the_limit_lives() -> None:
    with memory_group() as group:
        inside = start(group.joined_by(taker(16)))
        group.leave_bytes(32 * MIB)
        assert inside.communicate("\n", timeout=60) == ("took\n", None)
        assert (inside.returncode, group.kills) == (0, 0)


def test_who_is_left_of_a_test_that_failed_ends_with_its_group() -> None:
    def failing() -> None:
        with memory_group() as group:
            left.append(start(group.joined_by(taker(1))))
            folders.append(group.folder)
            raise ZeroDivisionError

    left: list[subprocess.Popen[str]] = []
    folders: list[Path] = []
    with pytest.raises(ZeroDivisionError):
        failing()
    assert left[0].wait(timeout=60) == -signal.SIGKILL
    left[0].communicate()
    assert not folders[0].exists()
