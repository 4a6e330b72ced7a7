"""``cxl-offload run``: the program gets the signals, and what it leaves behind is ended too."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = [sys.executable, "-m", "cxl_offload.cli.main", "run", "--"]
RANK = "import time; print(flush=True); time.sleep(60)"
LAUNCHER = f"""
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}], stdout=subprocess.PIPE)
rank.stdout.readline()
open("rank", "w").write(str(rank.pid))
os.rename("rank", "ranks")
rank.wait()
"""
"""Dies of a signal and leaves its rank at work, as DeepSpeed's launcher does."""

GRACEFUL = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (open("told", "a").write("x"), sys.exit(3)))
open("ranks", "w").write("0")
time.sleep(60)
"""


NOTICED = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def checkpoint(*_):
    open("told", "a").write("x")
    open("ranks", "w").write(str(worker.pid))
    sys.exit(5)
signal.signal({number}, checkpoint)
open("begun", "w").close()
time.sleep(60)
"""
"""Ends by itself at a notice, as scripts that save a checkpoint do, and leaves a process behind."""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Path]:
    """The file with the rank's number; the rank is ended whatever happens."""
    file = tmp_path / "ranks"
    yield file
    if file.exists() and (pid := int(file.read_text() or 0)) and _is_there(pid):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def signals_that_end() -> Iterator[None]:
    """Programs do not inherit that interrupts and hang-ups are ignored (nohup, CI)."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, did in before.items():
        signal.signal(number, did)


def _started(folder: Path, program: str) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(program)
    command = [*RUN, sys.executable, "program.py"]
    return subprocess.Popen(command, cwd=folder, start_new_session=True)


def _wait_for(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until, "the program did not begin"
        time.sleep(0.02)


def _is_there(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ],
)
def test_ranks_of_a_launcher_that_dies_are_ended(
    number: signal.Signals, tmp_path: Path, rank: Path
) -> None:
    run = _started(tmp_path, LAUNCHER)
    _wait_for(rank)
    pid = int(rank.read_text())
    assert _is_there(pid)

    os.kill(run.pid, number)  # this process alone, as a scheduler does it

    status = run.wait(60)
    assert status in (128 + number, 1)  # Python ends an interrupted script with a status of its own
    assert not _is_there(pid)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_notice_of_a_scheduler_reaches_the_program_and_ends_nobody_else(
    number: signal.Signals, tmp_path: Path, rank: Path
) -> None:
    run = _started(tmp_path, NOTICED.format(number=int(number)))
    _wait_for(tmp_path / "begun")

    os.kill(run.pid, number)

    assert run.wait(60) == 5
    assert (tmp_path / "told").read_text() == "x"
    assert _is_there(int(rank.read_text()))


def test_program_that_ends_an_interrupt_by_itself_keeps_its_status(
    tmp_path: Path, rank: Path
) -> None:
    run = _started(tmp_path, GRACEFUL)
    _wait_for(rank)

    os.kill(run.pid, signal.SIGINT)

    assert run.wait(60) == 3
    assert (tmp_path / "told").read_text() == "x"


def test_terminal_interrupts_the_program_once(tmp_path: Path, rank: Path) -> None:
    """Ctrl-C goes to all in the foreground; handed on as well, it would come twice."""
    (tmp_path / "program.py").write_text(GRACEFUL)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(RUN[0], [*RUN, sys.executable, "program.py"])
    _wait_for(rank)

    os.write(terminal, b"\x03")

    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 3
    assert (tmp_path / "told").read_text() == "x"
