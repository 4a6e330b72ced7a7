"""Times stretches of work and says whether others used the CPUs meanwhile."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Window:
    """Times a stretch of work, by the wall or in CPU seconds a thread, and says if it was alone.

    It was not where a thread was preempted more than twice, or others used the CPUs.
    """

    def __init__(self, clock: str, threads: int) -> None:
        self._cpu = clock == "cpu"
        self._threads = threads
        self.quiet = True
        self.seconds = 0.0

    def now(self) -> float:
        return time.process_time() / self._threads if self._cpu else time.perf_counter()

    def open(self) -> None:
        self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self._busy = others_busy_s()
        self._began = self.now()

    def close(self) -> None:
        self.seconds += self.now() - self._began
        switched = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._switches
        self.quiet &= switched <= 2 and others_busy_s() - self._busy <= 0.011

    def reset(self) -> None:
        self.quiet, self.seconds = True, 0.0


def others_busy_s() -> float:
    """CPU seconds of the whole machine but this process, stolen ones included."""
    return all_busy_s() - time.process_time()


def all_busy_s() -> float:
    """CPU seconds of the whole machine since it started, stolen ones included."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
