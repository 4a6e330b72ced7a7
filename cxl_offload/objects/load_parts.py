"""What a load of weights is made of: memory is made, files are read, and the rest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FAULT_IN, READING, REST = "fault-in", "reading", "rest"


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Measured seconds of a part, and the bytes that it made or read.

    Attributes
    ----------
    name
        ``fault-in``: memory of tiers is made, and its pages are there. ``reading``: weights are
        read or copied into it. ``rest``: what else the load took, most of it the framework's own;
        it has no bytes.
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

    Parts of blocks that threads run at the same time add up to more than the load took; the rest is
    then 0.
    """

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self._spent = dict.fromkeys((FAULT_IN, READING), (0.0, 0))

    def __enter__(self) -> LoadClock:
        with _lock:
            self._spent = dict.fromkeys((FAULT_IN, READING), (0.0, 0))
            _clocks.append(self)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        with _lock:
            _clocks.remove(self)

    @property
    def parts(self) -> tuple[LoadPart, ...]:
        """Of the last block that has ended."""
        made = [LoadPart(name, *spent) for name, spent in self._spent.items()]
        rest = self.seconds - sum(part.seconds for part in made)
        return (*made, LoadPart(REST, max(rest, 0.0)))

    def _add(self, name: str, seconds: float, nbytes: int) -> None:
        before, bytes_before = self._spent[name]
        self._spent[name] = (before + seconds, bytes_before + nbytes)


_clocks: list[LoadClock] = []
_lock = threading.Lock()


@contextlib.contextmanager
def part_of_load(name: str, nbytes: int) -> Iterator[None]:
    """A block that is a part of every load that is timed now; one that fails is no part."""
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    with _lock:
        for clock in _clocks:
            clock._add(name, took, nbytes)
