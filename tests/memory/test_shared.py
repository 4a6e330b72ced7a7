"""Shared memory of processes that were killed: the next start finds it and names it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.memory import Session, SharedRegion, find_leftovers, remove_leftovers
from cxl_offload.memory.shared import SHARED_ROOT

MIB = 1 << 20

# Maps a file as the package's own users do, and waits to be killed.
HOLDER = """
import fcntl, mmap, sys
file = open(sys.argv[1], "w+b")
fcntl.flock(file, fcntl.LOCK_SH)
file.truncate(4 << 20)
mapping = mmap.mmap(file.fileno(), 4 << 20)
mapping[: 2 << 20] = bytes(2 << 20)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A name in the shared memory of this machine that nobody else uses."""
    found = SHARED_ROOT / f"cxl_offload_test_{uuid4().hex}.mmap"
    yield found
    found.unlink(missing_ok=True)


def start_holder(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"mapped\n"
    return holder


def found_at(path: Path) -> list[int]:
    return [leftover.held_bytes for leftover in find_leftovers() if leftover.path == path]


def test_what_a_killed_process_left_is_found_and_named(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = start_holder(path)
    assert found_at(path) == [], "its owner lives"
    holder.kill()
    holder.communicate()
    assert found_at(path) == [2 * MIB]
    with caplog.at_level(logging.WARNING):
        Session.linux()
    assert [record for record in caplog.records if str(path) in record.message]
    (leftover,) = (found for found in find_leftovers() if found.path == path)
    subprocess.run(leftover.remedy, shell=True, check=True)
    assert not path.exists()
    assert found_at(path) == []


def test_file_is_no_leftover_while_one_of_its_processes_lives(path: Path) -> None:
    first, second = start_holder(path), start_holder(path)
    first.kill()
    first.communicate()
    assert found_at(path) == []
    second.kill()
    second.communicate()
    assert found_at(path) == [2 * MIB]


def test_doctor_lists_it_with_the_command_that_removes_it(path: Path) -> None:
    holder = start_holder(path)
    holder.kill()
    holder.communicate()
    rows = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["hazards"]
    (row,) = (row for row in rows if str(path) in row["found"])
    assert (row["name"], row["severity"]) == ("shared-leftover", "warning")
    assert row["remedy"] == f"rm {path}"


def test_other_files_and_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cxl_offload_a.lock").touch()
    (tmp_path / "other.mmap").touch()
    (tmp_path / "target").touch()
    os.symlink(tmp_path / "target", tmp_path / "cxl_offload_b.mmap")
    assert find_leftovers(tmp_path) == ()
    assert find_leftovers(tmp_path / "nowhere") == ()


@pytest.mark.timeout(600)
def test_what_is_no_regular_file_is_passed_by(tmp_path: Path) -> None:
    """Anybody may put a FIFO or a folder there; opening a FIFO waits for its other end."""
    for folder in (tmp_path / "cxl_offload_a.mmap", tmp_path / "cxl_offload_kv_a.mmap"):
        folder.mkdir()
    os.mkfifo(tmp_path / "cxl_offload_b.mmap")
    os.mkfifo(tmp_path / "cxl_offload_kv_b.mmap")
    os.symlink(tmp_path / "cxl_offload_b.mmap", tmp_path / "cxl_offload_c.mmap")
    left = tmp_path / "cxl_offload_d.mmap"
    left.write_bytes(bytes(MIB))
    assert [leftover.path for leftover in find_leftovers(tmp_path)] == [left]
    assert remove_leftovers(tmp_path) == ()


@pytest.mark.timeout(600)
def test_region_at_the_name_of_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cxl_offload_kv_taken.mmap")
    with pytest.raises(OSError, match="not a regular file"):
        SharedRegion("taken", MIB, root=tmp_path)
