"""What went over the links between nodes and GPUs, of one engine and of the whole process.

The counts of an engine outlive it, so that those of the process never fall.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cxl_offload import _C

DirectionName = Literal["to_device", "to_host"]

DIRECTIONS: Mapping[DirectionName, _C.Direction] = {
    "to_device": _C.Direction.to_device,
    "to_host": _C.Direction.to_host,
}


@dataclass(frozen=True, slots=True)
class CopyLink:
    """One way between a node and the GPU."""

    direction: DirectionName
    node: int


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What went over a link: all bytes, the copies that made them, and bytes that were staged."""

    nbytes: int
    copies: int
    staged_bytes: int

    def __add__(self, other: LinkUse) -> LinkUse:
        return LinkUse(
            self.nbytes + other.nbytes,
            self.copies + other.copies,
            self.staged_bytes + other.staged_bytes,
        )


LinkCounts = dict[CopyLink, LinkUse]


def counts_of(core: _C.CopyEngine) -> LinkCounts:
    """What one engine has handed to the GPU so far."""
    return {
        CopyLink(name, node): LinkUse(*use)
        for name, direction in DIRECTIONS.items()
        for node, use in core.use(direction).items()
    }


class LinkRecord:
    """The counts of one engine, also after its end; keeps it from nothing."""

    def __init__(self, core: _C.CopyEngine) -> None:
        self._core = weakref.ref(core)
        self._last: LinkCounts | None = None
        _records.append(self)

    def end(self, core: _C.CopyEngine) -> None:
        """The engine is about to go: nothing is added any more."""
        self._last = counts_of(core)

    @property
    def has_ended(self) -> bool:
        return self._last is not None or self._core() is None

    def counts(self) -> LinkCounts:
        """The counts now, or the last ones."""
        core = self._core()
        if core is not None and self._last is None:
            return counts_of(core)
        return self._last or {}


# Appended to by engines, also where a collector of garbage ends one: no lock is taken for that.
_records: deque[LinkRecord] = deque()
_past: LinkCounts = {}
_lock = threading.Lock()


def link_counts() -> LinkCounts:
    """What all copy engines of this process have handed to GPUs so far; never falls."""
    with _lock:
        total = dict(_past)
        for record in list(_records):
            is_over = record.has_ended
            counts = record.counts()
            _add(total, counts)
            if is_over:
                _add(_past, counts)
                _records.remove(record)
    return total


def _add(total: LinkCounts, more: LinkCounts) -> None:
    for link, use in more.items():
        total[link] = total[link] + use if link in total else use


def _forget_in_child() -> None:
    global _records, _past, _lock
    _records, _past, _lock = deque(), {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
