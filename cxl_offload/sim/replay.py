"""Discrete-event replay: when each recorded event would begin and end on a machine.

Steps are barriers and run one after another. Inside a step every queue runs its events in order,
queues side by side, and events that run at the same time share resources
(:mod:`cxl_offload.sim.sharing`). Set-up time of a copy occupies its queue, and no resource.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from cxl_offload.errors import ConfigError
from cxl_offload.sim.resources import Demand, Engines, Resources
from cxl_offload.sim.sharing import speeds
from cxl_offload.sim.timeline import Timeline
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine

__all__ = ["replay"]

_Job = tuple[float, float, int]
"""Set-up seconds, seconds alone, and the number of the demand."""

_Spans = list[tuple[float, float]]


def replay(
    trace: Trace,
    machine: Machine,
    *,
    initiator: int | None = None,
    gpu: str | None = None,
    engines: Engines | None = None,
) -> Timeline:
    """Simulate how long a trace takes on a machine.

    Parameters
    ----------
    trace
        Events in the order in which they were issued; steps may be recorded in any order.
    machine
        Must have every number that the events need. Its nodes are those that the events name.
    initiator
        Node whose CPUs work; the machine's own by default.
    gpu
        Which GPU copies and computes; the first by default.
    engines
        Rates that machine files do not have.

    Returns
    -------
    Timeline
        Simulated seconds, bytes, utilisation and tokens/s.

    Raises
    ------
    ConfigError
        The trace is empty, or the machine lacks a number that is needed; nothing is guessed.
    """
    if not len(trace):
        raise ConfigError("replay of an empty trace: record a run first")
    with _no_collection():
        return _replay(trace, machine, initiator, gpu, engines or Engines())


@contextmanager
def _no_collection() -> Iterator[None]:
    """A replay makes millions of tuples and no cycles; looking for cycles takes half its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _replay(
    trace: Trace, machine: Machine, initiator: int | None, gpu: str | None, engines: Engines
) -> Timeline:
    start = machine.initiator if initiator is None else initiator
    resources = Resources(machine, initiator=start, gpu=gpu, engines=engines)
    jobs, demands = _jobs(trace.events, resources)
    steps, order = _steps(trace.events)
    starts = np.zeros(len(trace))
    ends = np.zeros(len(trace))
    step_seconds = np.zeros(len(steps))
    clock = _Clock(jobs, demands)
    now = 0.0
    for at, queues in enumerate(steps):
        spans = clock.run(queues)
        for queue, of_queue in zip(queues, spans, strict=True):
            for event, (begin, end) in zip(queue, of_queue, strict=True):
                starts[event] = now + begin
                ends[event] = now + end
        step_seconds[at] = max(of_queue[-1][1] for of_queue in spans)
        now += float(step_seconds[at])
    numbers = np.array([job[2] for job in jobs])
    return Timeline.of(
        trace, machine, resources.names, demands, numbers, starts, ends, order, step_seconds
    )


def _jobs(events: Sequence[Event], resources: Resources) -> tuple[list[_Job], list[Demand]]:
    """Every event's job. Events that move the same bytes share a demand: a trace has few kinds."""
    known: dict[tuple[object, ...], _Job] = {}
    demands: list[Demand] = []
    jobs = []
    for event in events:
        key = (
            event.engine,
            tuple(event.read_bytes.items()),
            tuple(event.write_bytes.items()),
            event.accelerator_bytes,
            event.flops,
        )
        job = known.get(key)
        if job is None:
            setup_s, demand = resources.demands(event)
            job = (setup_s, max(demand.values(), default=0.0), len(demands))
            demands.append(demand)
            known[key] = job
        jobs.append(job)
    return jobs, demands


def _steps(events: Sequence[Event]) -> tuple[list[list[list[int]]], list[int]]:
    """Queues of every step as event numbers, and the steps' own numbers, ascending."""
    by_step: dict[int, dict[str, list[int]]] = {}
    for number, event in enumerate(events):
        by_step.setdefault(event.step, {}).setdefault(event.queue, []).append(number)
    order = sorted(by_step)
    return [list(by_step[step].values()) for step in order], order


class _Clock:
    """Runs one step at a time and remembers what it has worked out before."""

    def __init__(self, jobs: Sequence[_Job], demands: Sequence[Demand]) -> None:
        self._jobs = jobs
        self._resources = [frozenset(demand) for demand in demands]
        self._shapes: list[Demand] = []
        self._shape_of = self._number_shapes(demands)
        self._speeds: dict[tuple[int, ...], list[float]] = {}
        self._known: dict[tuple[tuple[int, ...], ...], list[_Spans]] = {}

    def _number_shapes(self, demands: Sequence[Demand]) -> list[int]:
        """Demands that differ in size alone share resources alike: they have one shape.

        Proportions are taken to a millionth, so that sizes rounded to bytes do not differ.
        """
        known: dict[tuple[int, ...], int] = {}
        numbers = []
        for demand in demands:
            per_million = 1e6 / max(demand.values(), default=1.0)
            parts = [int(seconds * per_million + 0.5) for seconds in demand.values()]
            shape = (*demand, *parts)
            number = known.get(shape)
            if number is None:
                number = known[shape] = len(self._shapes)
                proportions = zip(demand, parts, strict=True)
                self._shapes.append({at: part / 1e6 for at, part in proportions if part > 0})
            numbers.append(number)
        return numbers

    def run(self, queues: list[list[int]]) -> list[_Spans]:
        """Begin and end of every event of a step, from the step's begin on."""
        jobs = self._jobs
        if len(queues) == 1 or self._independent(queues):
            return [_in_a_row([jobs[event] for event in queue]) for queue in queues]
        key = tuple([tuple([jobs[event][2] for event in queue]) for queue in queues])
        spans = self._known.get(key)
        if spans is None:
            if len(self._known) > _REMEMBERED:
                self._known.clear()
            spans = self._share([[jobs[event] for event in queue] for queue in queues])
            self._known[key] = spans
        return spans

    def _independent(self, queues: list[list[int]]) -> bool:
        """Whether no two queues ever need the same resource."""
        seen: set[int] = set()
        for queue in queues:
            own = self._resources[self._jobs[queue[0]][2]]
            if len(queue) > 1:
                numbers = {self._jobs[event][2] for event in queue}
                own = own.union(*[self._resources[number] for number in numbers])
            if not seen.isdisjoint(own):
                return False
            seen |= own
        return True

    def _share(self, queues: list[list[_Job]]) -> list[_Spans]:
        """Event by event: the next thing that happens is the end of a set-up or of a job."""
        shape_of = self._shape_of
        spans: list[_Spans] = [[] for _ in queues]
        ahead = [iter(queue[1:]) for queue in queues]
        begun = [0.0] * len(queues)
        setup = [queue[0][0] for queue in queues]
        left = [queue[0][1] for queue in queues]  # seconds alone
        shape = [shape_of[queue[0][2]] for queue in queues]
        live = list(range(len(queues)))
        now = 0.0
        while live:
            working = [at for at in live if setup[at] == 0.0 and left[at] > 0.0]
            speed = self._speeds_of(tuple([shape[at] for at in working]))
            wait = math.inf if working else 0.0
            for at, s in zip(working, speed, strict=True):
                needed = left[at] / s
                if needed < wait:
                    wait = needed
            preparing = [at for at in live if setup[at] > 0.0]
            if len(working) + len(preparing) < len(live):
                wait = 0.0  # a job that moves nothing is over at once
            elif preparing:
                soonest = min([setup[at] for at in preparing])
                wait = min(wait, soonest) if working else soonest
            now += wait
            for at, s in zip(working, speed, strict=True):
                rest = left[at] - wait * s
                left[at] = rest if rest > _DUST * left[at] else 0.0
            for at in preparing:
                rest = setup[at] - wait
                setup[at] = rest if rest > _DUST * setup[at] else 0.0
            for at in [at for at in live if setup[at] == 0.0 and left[at] == 0.0]:
                spans[at].append((begun[at], now))
                job = next(ahead[at], None)
                if job is None:
                    live.remove(at)
                    continue
                begun[at] = now
                setup[at], left[at], number = job
                shape[at] = shape_of[number]
        return spans

    def _speeds_of(self, shapes: tuple[int, ...]) -> list[float]:
        known = self._speeds.get(shapes)
        if known is None:
            if len(self._speeds) > _REMEMBERED:
                self._speeds.clear()
            known = speeds([self._shapes[at] for at in shapes]) if shapes else []
            self._speeds[shapes] = known
        return known


_DUST = 1e-12  # what subtraction leaves of a time that is over
_REMEMBERED = 50_000


def _in_a_row(queue: list[_Job]) -> _Spans:
    spans = []
    now = 0.0
    for setup_s, seconds, _ in queue:
        end = now + setup_s + seconds
        spans.append((now, end))
        now = end
    return spans
