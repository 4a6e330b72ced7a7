"""What a load of weights is made of: memory is made, files are read, and the rest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

FAULT_IN, READING, REST = "fault-in", "reading", "rest"
AT_ONCE = "both at once"
_PARTS = (FAULT_IN, READING, AT_ONCE, REST)


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Measured seconds of a part, and the bytes that it made or read.

    Attributes
    ----------
    name
        ``fault-in``: memory of tiers is made, and its pages are there. ``reading``: weights are
        read or copied into it. ``both at once``: the time that counts in both of these, because
        a weight was read while memory of the next ones was made. ``rest``: neither went on, and
        most of it is the framework's own. So fault-in and reading, less both at once, and the
        rest are all of the load. The last two have no bytes.
    """

    name: str
    seconds: float
    nbytes: int = 0

    @property
    def bytes_per_s(self) -> float:
        """0 where it has no bytes, or took no time that can be measured."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for ``json.dumps``."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "bytes_per_s": self.bytes_per_s,
        }


class LoadClock:
    """The parts of what is loaded in a ``with`` block, by any thread of the process.

    Blocks of a part that threads run at the same time count once: a part is the time in which any
    of them runs.
    """

    def __init__(self) -> None:
        self.seconds = self._began = self._seen = 0.0
        self._forget()

    def __enter__(self) -> LoadClock:
        self._forget()
        with _lock:
            _clocks.append(self)
            self._began = self._seen = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._until(time.perf_counter())
            self.seconds = self._seen - self._began
            _clocks.remove(self)

    @property
    def parts(self) -> tuple[LoadPart, ...]:
        """Of the last block that has ended."""
        return tuple(LoadPart(name, self._spent[name], self._bytes[name]) for name in _PARTS)

    def _forget(self) -> None:
        self._spent = dict.fromkeys(_PARTS, 0.0)
        self._bytes, self._running = Counter[str](), Counter[str]()

    def _until(self, now: float) -> None:
        """Count the time since it was last asked for what runs."""
        running = [name for name in (FAULT_IN, READING) if self._running[name] > 0]
        for name in (*running, AT_ONCE) if len(running) > 1 else running or (REST,):
            self._spent[name] += now - self._seen
        self._seen = now


_clocks: list[LoadClock] = []
_lock = threading.Lock()


@contextlib.contextmanager
def part_of_load(name: str, nbytes: int) -> Iterator[None]:
    """A block that is a part of every load that is timed now; what fails has no bytes."""
    with _lock:
        clocks = tuple(_clocks)
        _change(clocks, name, 1, 0)
    moved = 0
    try:
        yield
        moved = nbytes
    finally:
        with _lock:
            _change(clocks, name, -1, moved)


def _change(clocks: Iterable[LoadClock], name: str, running: int, nbytes: int) -> None:
    now = time.perf_counter()
    for clock in clocks:
        if clock in _clocks:
            clock._until(now)
            clock._running[name] += running
            clock._bytes[name] += nbytes
