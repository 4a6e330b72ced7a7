"""Copies of KV blocks in host memory by a thread of their own, off everybody's path."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cxl_offload.transfer import HostCopier

CopyLists: TypeAlias = "tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]"
"""Targets, sources and bytes of every block."""

# Of the newest copy in the running mean of seconds a byte.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """What became of one submission; ``failure`` is None where all bytes are there."""

    id: int
    nbytes: int
    seconds: float
    failure: Exception | None


@dataclass(frozen=True, slots=True)
class _Order:
    id: int
    lists: Callable[[], CopyLists]
    nbytes: int
    then: Callable[[], None]


class CopyQueue:
    """A queue of gathers and scatters, and the thread that works it off.

    Parameters
    ----------
    cpus
        To copy with; the thread runs on them wherever the caller is bound.
    name
        Of the thread.
    """

    def __init__(self, cpus: Sequence[int], name: str) -> None:
        self._cpus = list(cpus)
        self._copier = HostCopier(cpus=self._cpus)
        self._changed = threading.Condition()
        self._urgent: deque[_Order] = deque()
        self._patient: deque[_Order] = deque()
        self._waiting_bytes = 0
        self._unfinished: set[int] = set()
        self._finished: list[FinishedCopy] = []
        self._seconds_per_byte = 0.0
        self._ends = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self,
        job: int,
        lists: Callable[[], CopyLists],
        *,
        nbytes: int = 0,
        urgent: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Queues a copy and returns at once.

        Parameters
        ----------
        lists
            Called by the thread when it is the copy's turn.
        nbytes
            What it counts for in :attr:`waiting_bytes`.
        urgent
            Goes before all that are not; among each other they keep their order.
        then
            Called by the thread when the bytes are there; part of the copy.
        """
        order = _Order(job, lists, nbytes, then)
        with self._changed:
            (self._urgent if urgent else self._patient).append(order)
            self._unfinished.add(job)
            self._waiting_bytes += nbytes
            self._changed.notify_all()

    @property
    def waiting_bytes(self) -> int:
        """Announced by submissions that are not finished."""
        return self._waiting_bytes

    @property
    def seconds_per_byte(self) -> float:
        """Running mean over the copies of late; 0 before the first."""
        return self._seconds_per_byte

    def finished(self) -> list[FinishedCopy]:
        """What has finished since the last call."""
        with self._changed:
            done, self._finished = self._finished, []
            return done

    def wait(self, ids: Collection[int] | None = None) -> None:
        """Until those of these submissions that are under way have finished; None: all."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._unfinished.isdisjoint(ids) if ids is not None else not self._unfinished
                )
            )

    def stop(self) -> None:
        """Finishes what was submitted and ends the thread."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        os.sched_setaffinity(0, self._cpus)
        while (order := self._next()) is not None:
            result = self._copy(order)
            with self._changed:
                self._finished.append(result)
                self._unfinished.discard(order.id)
                self._waiting_bytes -= order.nbytes
                self._changed.notify_all()

    def _next(self) -> _Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._patient or self._ends)
            for queue in (self._urgent, self._patient):
                if queue:
                    return queue.popleft()
        return None

    def _copy(self, order: _Order) -> FinishedCopy:
        begin = time.perf_counter()
        try:
            targets, sources, sizes = order.lists()
            self._copier.copy_blocks(targets=targets, sources=sources, sizes=sizes)
            order.then()
        except Exception as failure:  # raised again where the result is asked for
            return FinishedCopy(order.id, 0, time.perf_counter() - begin, failure)
        seconds, nbytes = time.perf_counter() - begin, int(sizes.sum())
        if nbytes:
            latest, known = seconds / nbytes, self._seconds_per_byte
            self._seconds_per_byte = latest if known == 0 else known + _NEWEST * (latest - known)
        return FinishedCopy(order.id, nbytes, seconds, None)
