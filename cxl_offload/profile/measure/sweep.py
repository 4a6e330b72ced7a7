"""Weighted interleaves over a set of nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise

from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.profile.cpus import CpuOrder
from cxl_offload.profile.measure import probe
from cxl_offload.profile.measure.effort import Effort
from cxl_offload.profile.measure.findings import Findings
from cxl_offload.profile.measure.probe import Allocator, Quality
from cxl_offload.profile.model import InterleavePoint, InterleaveSweep
from cxl_offload.profile.schedule import SETUP, Schedule

_PARTS = {2: 10, 3: 5, 4: 4}
_PARTS_OF_MANY = 3


def sweep_weights(nodes: tuple[int, ...]) -> tuple[dict[int, int], ...]:
    """Every way to give equal parts to the nodes, nodes without any left out.

    Tenths for two nodes, fifths for three, fourths for four, thirds for more; reduced, so that
    5:5 is 1:1.
    """
    parts = _PARTS.get(len(nodes), _PARTS_OF_MANY)
    found = []
    for bars in combinations(range(parts + len(nodes) - 1), len(nodes) - 1):
        edges = (-1, *bars, parts + len(nodes) - 1)
        shares = [after - before - 1 for before, after in pairwise(edges)]
        divisor = math.gcd(*shares)
        found.append(
            {node: share // divisor for node, share in zip(nodes, shares, strict=True) if share}
        )
    return tuple(found)


def least_bytes(nodes: int) -> int:
    """Bytes below which a sweep over so many nodes would not have whole cycles of granules."""
    return 8 * HUGE_PAGE_BYTES * _PARTS.get(nodes, _PARTS_OF_MANY)


class SweepProbe:
    """Load bandwidth of one initiator on every weighted interleave over ``nodes``."""

    def __init__(
        self,
        allocator: Allocator,
        initiator: int,
        nodes: tuple[int, ...],
        *,
        order: CpuOrder,
        nbytes: int,
        effort: Effort,
    ) -> None:
        self._allocator = allocator
        self._initiator = initiator
        self._nodes = nodes
        self._order = order
        self._nbytes = nbytes
        self._effort = effort
        self._points: list[InterleavePoint] = []
        self.quality = Quality()

    def plan(self, schedule: Schedule) -> None:
        """Adds a step for every set of weights."""
        for weights in sweep_weights(self._nodes):
            text = ":".join(str(weights.get(node, 0)) for node in self._nodes)
            nodes = ", ".join(map(str, self._nodes))
            schedule.add(
                f"CPUs of node {self._initiator} on nodes {nodes} interleaved {text}",
                partial(self._measure, weights),
                setup=SETUP,
            )

    @property
    def longest_s(self) -> float:
        """What one step takes at most."""
        return self._effort.longest_s

    def collect(self, skipped: Sequence[str], into: Findings) -> None:
        """Adds this sweep, if anything of it was measured."""
        sweep = self.result()
        if sweep is not None:
            into.sweeps.append(sweep)
        into.not_measured(skipped)
        if note := self.quality.note():
            nodes = ", ".join(map(str, self._nodes))
            into.notes.append(f"nodes {nodes} interleaved: {note}")

    def result(self) -> InterleaveSweep | None:
        """What was found, or None if there was no time for anything."""
        if not self._points:
            return None
        return InterleaveSweep(
            initiator=self._initiator,
            nodes=self._nodes,
            threads=len(self._order.cpus),
            pages="base",
            points=tuple(self._points),
        )

    def close(self) -> None:
        """Holds no buffer between steps."""

    def _measure(self, weights: Mapping[int, int], seconds: float) -> None:
        self._allocator.trim()  # every set of weights has a pool of its own
        cpus = self._order.cpus
        buffer = probe.prepare(self._allocator, self._nbytes, weights, pages="base", cpus=cpus)
        point = probe.kind_bandwidth(
            buffer,
            "load",
            cpus,
            seconds=seconds,
            repeats=self._effort.repeats,
            quality=self.quality,
        )
        self._points.append(
            InterleavePoint(weights=weights, bandwidth_bytes_per_s=point.bandwidth_bytes_per_s)
        )
