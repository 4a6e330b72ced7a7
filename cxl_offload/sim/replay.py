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
from itertools import pairwise

import numpy as np

from cxl_offload.errors import ConfigError
from cxl_offload.sim.cache import Cache
from cxl_offload.sim.columns import Columns, Floats, Integers
from cxl_offload.sim.fabric import Fabric
from cxl_offload.sim.lockstep import run_together
from cxl_offload.sim.resources import Engines, Resources
from cxl_offload.sim.serial import OneByOne
from cxl_offload.sim.timeline import Timeline
from cxl_offload.sim.trace import Trace
from cxl_offload.sim.work import Work
from cxl_offload.topology import Machine

__all__ = ["replay"]

_TOGETHER = 32
"""Alike steps from which arrays are quicker than one step at a time."""


def replay(
    trace: Trace,
    machine: Machine,
    *,
    initiator: int | None = None,
    gpu: str | None = None,
    engines: Engines | None = None,
    fabric: Fabric | None = None,
    cache: Cache | None = None,
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
    fabric
        Switches that nodes and GPUs are behind; none by default.
    cache
        What the last-level cache keeps of CPU work; nothing by default. Bytes that the timeline
        counts are those of the trace, hits or not.

    Returns
    -------
    Timeline
        Simulated seconds, bytes, utilisation and tokens/s.

    Raises
    ------
    ConfigError
        The trace is empty, or the machine lacks a number that is needed; nothing is guessed.
    ValueError
        The machine has no such node or GPU.
    """
    if not len(trace):
        raise ConfigError("replay of an empty trace: record a run first")
    start = machine.initiator if initiator is None else initiator
    resources = Resources(
        machine,
        initiator=start,
        gpu=gpu,
        engines=engines or Engines(),
        fabric=fabric,
        cache=cache,
    )
    with _no_collection():
        return _replay(trace, machine.name, resources)


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


def _replay(trace: Trace, machine: str, resources: Resources) -> Timeline:
    columns = Columns.of(trace.events)
    demands = [resources.of(group) for group in columns.groups]
    rates = resources.rates
    starts, ends, step_seconds = _times(columns, Work.of(columns, demands, rates.losses))
    nodes = {node for group in columns.groups for node in (*group.kind.reads, *group.kind.writes)}
    return Timeline.of(
        trace,
        machine=machine,
        columns=columns,
        demands=demands,
        names=rates.names,
        node_rates={node: rates.node_bytes_per_s(node) for node in sorted(nodes)},
        starts=starts,
        ends=ends,
        step_seconds=step_seconds,
    )


def _times(columns: Columns, work: Work) -> tuple[Floats, Floats, Floats]:
    """Begin and end of every event, and the seconds of every step in the order of the steps."""
    order = np.lexsort((columns.queue_of, columns.step_of))
    step_of = columns.step_of[order]
    begins = np.flatnonzero(np.concatenate(([True], step_of[1:] != step_of[:-1])))
    sizes = np.diff(np.append(begins, len(order)))
    starts, ends = np.zeros(len(order)), np.zeros(len(order))
    seconds = np.zeros(len(begins))
    one_by_one: OneByOne | None = None
    for steps in _alike(columns, order, begins, sizes):
        first = begins[steps[0]]
        events = order[begins[steps][:, None] + np.arange(sizes[steps[0]])]
        queues = _queues(columns.queue_of[order[first : first + sizes[steps[0]]]])
        if len(steps) >= _TOGETHER and not work.losses and _countable(columns, queues):
            starts[events], ends[events] = run_together(work, events, queues)
        else:
            one_by_one = one_by_one or OneByOne(work)
            for row in events:
                _run_one(one_by_one, row, queues, starts, ends)
        seconds[steps] = ends[events].max(axis=1)
    offsets = np.zeros(len(begins))
    np.cumsum(seconds[:-1], out=offsets[1:])
    shift = np.empty(len(order))
    shift[order] = np.repeat(offsets, sizes)
    return starts + shift, ends + shift, seconds


def _alike(columns: Columns, order: Integers, begins: Integers, sizes: Integers) -> list[Integers]:
    """Steps by what their queues hold: the same kinds of events in the same order."""
    code = columns.queue_of[order] * len(columns.groups) + columns.kind_of[order]
    contents = code.tobytes()
    width = code.itemsize
    found: dict[bytes, list[int]] = {}
    for step, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
        found.setdefault(contents[begin * width : (begin + size) * width], []).append(step)
    return [np.array(steps, dtype=np.int64) for steps in found.values()]


def _queues(queue_of: Integers) -> list[tuple[int, int]]:
    """First and one past the last event of every queue of a step, whose events are by queue."""
    bounds = [0, *(np.flatnonzero(np.diff(queue_of)) + 1).tolist(), len(queue_of)]
    return list(pairwise(bounds))


def _countable(columns: Columns, queues: Sequence[tuple[int, int]]) -> bool:
    """Whether every choice of a kind for each queue has a whole number of its own."""
    return math.log2(len(columns.groups) + 1) * len(queues) < 62


def _run_one(
    one_by_one: OneByOne,
    events: Integers,
    queues: Sequence[tuple[int, int]],
    starts: Floats,
    ends: Floats,
) -> None:
    numbers = events.tolist()
    spans = one_by_one.run([numbers[begin:stop] for begin, stop in queues])
    for (begin, stop), of_queue in zip(queues, spans, strict=True):
        for event, (begun, ended) in zip(numbers[begin:stop], of_queue, strict=True):
            starts[event] = begun
            ends[event] = ended
