"""A command that is told to end from outside: what it held is given back, and one line says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from cxl_offload.cli import INTERRUPTED, STOPPED, TERMINATED, TOLD_TO_END


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever gives something back at Ctrl-C does so now."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` in the block; a second one ends the process at once.

    Not where somebody else answers to it or ignores it, and not in a rank of torchrun's job: that
    one waits for the others in C, where nothing is raised, and its launcher waits for its end.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and "RANK" not in os.environ
    )
    if not is_ours:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def last_words(stopped: KeyboardInterrupt) -> tuple[str, int]:
    """The line of a command that was stopped, and its exit status."""
    is_told = isinstance(stopped, Terminated)
    return (TOLD_TO_END, TERMINATED) if is_told else (STOPPED, INTERRUPTED)


def _end(number: int, _: object) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated
