"""When a round is over: its time is, or somebody ends the soak by Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

asked = threading.Event()
"""Set by the first signal. Rounds end early then, and check what they leave as ever."""

received: list[int] = []


def goes_on(until: float) -> bool:
    """Whether a round has time left; ``until`` is of ``time.monotonic``."""
    return time.monotonic() < until and not asked.is_set()


def end_in_order() -> None:
    """The first signal ends the soak after its round; the second one ends it where it is."""
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child: Ctrl-C is its parent's to answer
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if asked.is_set():
            raise KeyboardInterrupt
        received.append(number)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
