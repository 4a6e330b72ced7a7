"""Hardware counters as a signal, where the kernel lets a process read its own.

Caption estimates throughput by a linear function of counters, which was fitted on recorded runs.
Only the direction of the estimate counts (Sun et al., Demystifying CXL Memory with Genuine
CXL-Ready Systems, 6.1). Caption reads uncore counters, which need privileges. This module reads
those of its own process.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from cxl_offload.errors import ConfigError
from cxl_offload.tune.state_file import read_state, write_state

EVENTS = ("cycles", "instructions", "l1_misses", "llc_misses")
"""What is counted, in the order of :class:`Counts`."""

_HARDWARE, _CACHE = 0, 3  # linux/perf_event.h
_READ_MISS = 1 << 16  # of a cache: PERF_COUNT_HW_CACHE_OP_READ, _RESULT_MISS
_CONFIGS = ((_HARDWARE, 0), (_HARDWARE, 1), (_CACHE, 0 | _READ_MISS), (_CACHE, 2 | _READ_MISS))
_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_EXCLUDE_KERNEL_AND_HYPERVISOR = 1 << 5 | 1 << 6
_INHERIT = 1 << 1
_ATTR_BYTES = 112
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class PerfEvents(Protocol):
    """The kernel's counters; tests have others."""

    def open(self, event: str, thread: int) -> int:
        """A file descriptor that counts an event of a thread; raises OSError."""
        ...

    def read(self, descriptor: int) -> int:
        """What it has counted."""
        ...

    def close(self, descriptor: int) -> None:
        """Counts no more."""
        ...


class LinuxPerfEvents:
    """``perf_event_open(2)``, without the kernel's own instructions."""

    def open(self, event: str, thread: int) -> int:
        number = _SYSCALLS.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, f"no counters on {platform.machine()}")
        kind, config = _CONFIGS[EVENTS.index(event)]
        flags = _INHERIT | _EXCLUDE_KERNEL_AND_HYPERVISOR
        head = struct.pack("=IIQQQQQ", kind, _ATTR_BYTES, config, 0, 0, 0, flags)
        attributes = ctypes.create_string_buffer(head, _ATTR_BYTES)
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(number, attributes, thread, -1, -1, ctypes.c_ulong(0))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(found)

    def read(self, descriptor: int) -> int:
        (count,) = struct.unpack("=Q", os.read(descriptor, 8))
        return int(count)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Counts:
    """Events of a span of time."""

    cycles: int
    instructions: int
    l1_misses: int
    llc_misses: int

    def features(self) -> tuple[float, float, float]:
        """Instructions a cycle, and misses of L1 and of the last cache in 1000 instructions."""
        per_thousand = 1000.0 / max(self.instructions, 1)
        return (
            self.instructions / max(self.cycles, 1),
            self.l1_misses * per_thousand,
            self.llc_misses * per_thousand,
        )


class StepCounters:
    """Counts events of all threads of this process from step to step.

    Threads that start later count with the thread that starts them.

    Raises
    ------
    ConfigError
        The kernel refuses; one line that says what to do.
    """

    def __init__(self, events: PerfEvents | None = None) -> None:
        self._events = events or LinuxPerfEvents()
        self._open: list[list[int]] = []
        try:
            for event in EVENTS:
                of_event: list[int] = []
                self._open.append(of_event)
                for thread in _threads():
                    of_event.append(self._events.open(event, thread))
        except OSError as reason:
            self.close()
            raise ConfigError(_refusal(reason)) from None
        self._before = self._totals()

    def _totals(self) -> list[int]:
        return [sum(self._events.read(one) for one in of_event) for of_event in self._open]

    def step(self) -> Counts:
        """Events since the last call."""
        now = self._totals()
        counts = Counts(*(new - old for new, old in zip(now, self._before, strict=True)))
        self._before = now
        return counts

    def close(self) -> None:
        """Counts no more; calling again does nothing."""
        for of_event in self._open:
            for descriptor in of_event:
                self._events.close(descriptor)
        self._open = []


def _threads() -> list[int]:
    return sorted(int(path.name) for path in Path("/proc/self/task").iterdir())


def _refusal(reason: OSError) -> str:
    if reason.errno in (errno.EACCES, errno.EPERM):
        level = _PARANOID.read_text().strip() if _PARANOID.exists() else "unknown"
        return (
            f"hardware counters: the kernel refuses them (kernel.perf_event_paranoid is {level}); "
            "set it to 2 or lower, or tune by step_time"
        )
    return (
        f"hardware counters: this machine has none for processes ({reason.strerror}), as many "
        "virtual machines; tune by step_time"
    )


@dataclass(frozen=True, slots=True)
class CounterEstimator:
    """Steps a second as a linear function of counters.

    Attributes
    ----------
    intercept, weights
        Of :meth:`Counts.features`.
    error
        Root mean square error on the steps that it was fitted on, over the mean.
    """

    intercept: float
    weights: tuple[float, ...]
    error: float

    @classmethod
    def fit(cls, counts: Sequence[Counts], step_s: ArrayLike) -> CounterEstimator:
        """Least squares over recorded steps, at several shares of the far tier.

        Raises
        ------
        ValueError
            Fewer than five steps, other numbers of steps than of counts, or a time that is not
            positive.
        """
        seconds = np.asarray(step_s, dtype=np.float64)
        features = np.array([one.features() for one in counts])
        if len(counts) < 5 or seconds.shape != (len(counts),) or not (seconds > 0).all():
            raise ValueError(
                f"{len(counts)} counts and {seconds.shape} step times: need as many of each, five "
                "or more, all times positive"
            )
        rate = 1.0 / seconds
        table = np.column_stack([np.ones(len(counts)), features])
        found = np.linalg.lstsq(table, rate, rcond=None)[0]
        off = table @ found - rate
        error = float(np.sqrt(np.mean(off * off)) / rate.mean())
        return cls(float(found[0]), tuple(float(one) for one in found[1:]), error)

    def seconds(self, counts: Counts) -> float:
        """The estimated time of a step: what a tuner takes in place of the measured one.

        Infinity if the estimate is not a positive rate. Tuners leave such steps out.
        """
        features = counts.features()
        rate = self.intercept + sum(
            weight * value for weight, value in zip(self.weights, features, strict=True)
        )
        return 1.0 / rate if rate > 0 else float("inf")

    def save(self, path: Path) -> None:
        """Writes the fit as JSON."""
        write_state(
            path, {"intercept": self.intercept, "weights": self.weights, "error": self.error}
        )

    @classmethod
    def load(cls, path: Path) -> CounterEstimator:
        """Reads what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            No such file, or it is damaged.
        """
        saved = read_state(path)
        try:
            if saved is None:
                raise KeyError("file")
            weights = tuple(float(one) for one in saved["weights"])
            made = cls(float(saved["intercept"]), weights, float(saved["error"]))
            if len(weights) != 3 or not np.isfinite([made.intercept, *weights]).all():
                raise ValueError("weights")
        except (KeyError, TypeError, ValueError) as problem:
            raise ConfigError(
                f"{path}: not a fit of counters ({json.dumps(str(problem))})"
            ) from problem
        return made
