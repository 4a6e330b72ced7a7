"""Numbers of batches of every mode in the order of their bounds.

The exact bound looks at every pair of cuts of the weights, which are hundreds. A rough one looks at
every cut once, and most batches are never as good as the best that is found by then: so the exact
one is worked out only for those whose turn comes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.plan.flexgen.bound import least_seconds, rough_seconds
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.layout import WeightCut
from cxl_offload.plan.flexgen.mode import Mode
from cxl_offload.plan.hardware import Hardware

_STEP = 1.02
"""Rough bounds up to so much above the one whose turn it is are made exact together, ..."""
_MOST_AT_ONCE = 128
"""... but not more of them."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Numbers of batches of a mode by ascending rough bounds, from ``start`` on."""

    mode: Mode
    batches: Floats
    rough: Floats
    start: int = 0


class Turns:
    """What is left to try, the lowest bound first; of equals, the mode that was offered first."""

    def __init__(self, job: FlexGenJob, hardware: Hardware, levels: tuple[WeightCut, ...]) -> None:
        self._job, self._hardware, self._levels = job, hardware, levels
        self._heap: list[tuple[float, int, int, Any]] = []
        self._modes = 0
        self._more = itertools.count(1)
        self._without_room: dict[Mode, int] = {}

    def offer(self, mode: Mode, batches: Floats) -> None:
        """One more mode.

        Parameters
        ----------
        batches
            float64 ``(B,)``: numbers of GPU batches; may have no entry.
        """
        seconds = rough_seconds(self._job, self._hardware, mode, self._levels, batches)
        each = seconds / batches / mode.gpu_batch
        order = np.argsort(each, kind="stable")[: int(np.count_nonzero(each < np.inf))]
        self._modes += 1
        self._wait(self._modes, _Waiting(mode, batches[order], each[order]))

    def bound(self, mode: Mode, count: int) -> float:
        """Seconds a sequence that nothing of this mode and number of batches undercuts."""
        return float(self._exact(mode, np.array([float(count)]))[0])

    def put_first(self, mode: Mode, count: int) -> None:
        """Lets this be the next one; its bound is told as -1."""
        heapq.heappush(self._heap, (-1.0, 0, count, mode))

    def put(self, bound: float, mode: Mode, count: int) -> None:
        """Waits for the turn of a bound that is known, in seconds a sequence."""
        heapq.heappush(self._heap, (bound, 0, next(self._more), (mode, count)))

    def leave_out(self, mode: Mode, count: int) -> None:
        """So many batches of a mode, and more, which need no less room."""
        self._without_room[mode] = min(count, self._without_room.get(mode, count))

    def next(self) -> tuple[float, int, Mode] | None:
        """Seconds a sequence that nothing of it undercuts, the number of batches, and the mode."""
        while self._heap:
            bound, at, count, what = heapq.heappop(self._heap)
            if isinstance(what, _Waiting):
                if self._without_room.get(what.mode) != 1:
                    self._make_exact(at, what)
                continue
            mode, count = (what, count) if isinstance(what, Mode) else what
            if count < self._without_room.get(mode, math.inf):
                return bound, count, mode
        return None

    def _wait(self, at: int, waiting: _Waiting) -> None:
        if waiting.start < len(waiting.rough):
            heapq.heappush(self._heap, (float(waiting.rough[waiting.start]), at, 0, waiting))

    def _make_exact(self, at: int, waiting: _Waiting) -> None:
        start, mode = waiting.start, waiting.mode
        end = int(np.searchsorted(waiting.rough, waiting.rough[start] * _STEP, side="right"))
        end = min(end, start + _MOST_AT_ONCE)
        batches = waiting.batches[start:end]
        each = self._exact(mode, batches)
        for place in np.flatnonzero(each < np.inf):
            heapq.heappush(self._heap, (float(each[place]), at, int(batches[place]), mode))
        self._wait(at, _Waiting(mode, waiting.batches, waiting.rough, end))

    def _exact(self, mode: Mode, batches: Floats) -> Floats:
        seconds = least_seconds(self._job, self._hardware, mode, self._levels, batches)
        return seconds / batches / mode.gpu_batch
