"""A program that a command runs in its place: it gets the signals, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

_PATIENCE_S = 10.0
"""For processes that are told to end, before the command ends without them."""

_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send to say that the end is near, such as Slurm's ``--signal=B:USR1@60``.

A program that takes no notice of them dies of them, as this process would.
"""


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """Waits until a program ends, and gives its exit status as ``Popen`` has it.

    Signals that would end this process go to the program. Launchers such as DeepSpeed's die of one
    and leave their ranks at work: what the program had started gets the signal too if it outlives
    the program. A notice (SIGUSR1, SIGUSR2) that the program survived ends nobody.
    """
    started: dict[int, int] = {}
    got: list[int] = []

    def pass_on(number: int, _: object) -> None:
        got.append(number)
        started.update(_descendants(child.pid))
        child.send_signal(number)

    def interrupt(number: int, frame: object) -> None:
        # A terminal interrupts (or quits) the program as well, which then says how it ends.
        if not _terminal_interrupts():
            pass_on(number, frame)

    told = (signal.SIGTERM, signal.SIGHUP, *_NOTICES)
    before = {each: signal.signal(each, pass_on) for each in told}
    before |= {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGQUIT)}
    try:
        code = child.wait()
        ending = [each for each in got if each not in _NOTICES or code == -each]
        if ending:
            _end(started, ending[-1])
    finally:
        for number, former in before.items():
            signal.signal(number, former)
    return code


def _end(started: dict[int, int], number: int) -> None:
    """Sends those processes that are still there a signal, and waits until they are gone."""
    until = time.monotonic() + _PATIENCE_S
    for pid in _alive(started):
        try:
            os.kill(pid, number)
        except OSError:  # gone, or another user's by now
            continue
    while _alive(started) and time.monotonic() < until:
        time.sleep(0.05)


def _alive(started: dict[int, int]) -> list[int]:
    """Those that are the same process as before: a number is given again."""
    return [pid for pid, begun in started.items() if (found := _facts(pid)) and found[1] == begun]


def _descendants(pid: int) -> dict[int, int]:
    """Processes that a process has started, and those that they have: to when they began."""
    known = {int(each.name): _facts(int(each.name)) for each in Path("/proc").glob("[0-9]*")}
    found: dict[int, int] = {}
    parents = {pid}
    while parents:
        children = {
            each: facts[1]
            for each, facts in known.items()
            if facts is not None and facts[0] in parents and each not in found
        }
        found |= children
        parents = set(children)
    return found


def _facts(pid: int) -> tuple[int, int] | None:
    """Parent and beginning (in clock ticks) of a process; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent, *rest = text.rpartition(")")[2].split()  # a name may have spaces
    return None if state in "ZX" else (int(parent), int(rest[17]))


def _terminal_interrupts() -> bool:
    """Whether Ctrl-C in a terminal reaches this process, and so what it has started."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
