"""Reads the values of all metrics, in the thread of whoever asks.

No lock of this package is held while the kernel is asked, and those that are taken to read counters
are held for as long as it takes to copy them. Pages are never asked.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import cxl_offload
from cxl_offload.core import ForkGuard
from cxl_offload.memory import Session, current_session
from cxl_offload.metrics.health import HealthReader, health_here
from cxl_offload.metrics.table import tier_label
from cxl_offload.objects.kind_counts import live_kinds
from cxl_offload.topology import Machine
from cxl_offload.topology.hazards import Hazard, find_hazards
from cxl_offload.topology.health import MachineHealth
from cxl_offload.transfer import link_counts
from cxl_offload.tune import decisions


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric, and the values of its labels."""

    labels: tuple[str, ...]
    value: float


MetricSamples = Mapping[str, tuple[Sample, ...]]
"""Stem of a metric to its samples; a metric without any is left out."""


class MetricsReader:
    """What a process holds, copies and decides, as numbers; thread-safe.

    In a forked child, which has not the session of its parent, it reads nothing.

    Parameters
    ----------
    session
        None asks :func:`~cxl_offload.memory.current_session` each time.
    find, look
        What looks for hazards, and what reads the counters of errors of a machine; neither is asked
        for a simulated one.
    """

    def __init__(
        self,
        session: Session | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        find: Callable[[], Iterable[Hazard]] = find_hazards,
        look: Callable[[Machine], MachineHealth] = health_here,
    ) -> None:
        self._session = session
        self._clock = clock
        self._health = HealthReader(find, look)
        self._guard = ForkGuard()
        self._lock = threading.Lock()  # of those that read at the same time, and of nobody else
        self._latest: MetricSamples = {}
        self._read_at: float | None = None
        if session is None:
            current_session()  # made now, rather than while a thread of the program waits for it

    def read(self, *, most_age_s: float = 0.0) -> MetricSamples:
        """All samples; those of the last reading if they are no older than ``most_age_s``."""
        if self._guard.in_child:
            return {}
        with self._lock:
            now = self._clock()
            is_old = self._read_at is None or now - self._read_at >= most_age_s
            if is_old:
                self._latest = self._read(now)
                self._read_at = now
            return self._latest

    def _read(self, now: float) -> MetricSamples:
        session = self._session or current_session()
        found: defaultdict[str, list[Sample]] = defaultdict(list)

        def add(stem: str, value: float, *labels: object) -> None:
            found[stem].append(Sample(tuple(map(str, labels)), value))

        nodes = "simulated" if session.is_simulated else "real"
        add("info", 1, cxl_offload.__version__, session.machine.name, nodes)
        _add_session(add, session)
        _add_kinds(add, session.machine)
        for link, use in link_counts().items():
            add("copy", use.nbytes, link.direction, link.node)
            add("copy.pieces", use.copies, link.direction, link.node)
            add("copy.staged", use.staged_bytes, link.direction, link.node)
        for one in decisions():
            add("tune.decisions", one.count, one.framework, one.tuner, one.outcome)
            add("tune.moved", one.nbytes, one.framework, one.tuner, one.outcome)
        if not session.is_simulated:
            self._health.add_to(add, session.machine, now)
        return {stem: tuple(samples) for stem, samples in found.items()}


Add = Callable[..., None]


def _add_session(add: Add, session: Session) -> None:
    stats, machine = session.stats(), session.machine
    add("pool.asked", stats.asked_bytes.current)
    add("pool.held", stats.held_bytes.current)
    add("pool.mapped", stats.mapped_bytes.current)
    add("pool.mapped_peak", stats.mapped_bytes.peak)
    add("pool.cached", stats.cached_bytes.current)
    add("pool.live_allocations", stats.allocations.current)
    add("pool.allocations", stats.allocations.total)
    add("pool.allocated", stats.asked_bytes.total)
    for node, use in stats.nodes.items():
        labels = (node, tier_label(machine, node))
        add("node.held", use.current_bytes, *labels)
        add("node.held_peak", use.peak_bytes, *labels)
        if use.capacity_bytes is not None:
            add("node.limit", use.capacity_bytes, *labels)
    for each in machine.usable_nodes():
        labels = (each.id, tier_label(machine, each.id))
        add("node.capacity", each.capacity_bytes, *labels)
        add("node.free", session.free_bytes(each.id), *labels)
    for device, use in stats.devices.items():
        add("device.held", use.current_bytes, device)


def _add_kinds(add: Add, machine: Machine) -> None:
    for kind, held in live_kinds().items():
        add("kind.requested", held.requested_bytes, kind)
        for node, nbytes in held.granted.items():
            add("kind.granted", nbytes, kind, node, tier_label(machine, node))
