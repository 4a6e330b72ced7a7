"""Discrete-event replay: when each recorded event would begin and end on a machine.

Steps are barriers and run one after another. Inside a step every queue runs its events in order,
queues side by side, and events that run at the same time share resources
(``csrc/replay/sharing.h``). Set-up time of a copy occupies its queue, and no resource. The
loop over events is the core's (``csrc/replay/steps.h``).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from cxl_offload import _C
from cxl_offload.arrays import Floats
from cxl_offload.errors import ConfigError
from cxl_offload.sim.cache import Cache
from cxl_offload.sim.columns import Columns
from cxl_offload.sim.fabric import Fabric
from cxl_offload.sim.machine import Rates
from cxl_offload.sim.resources import Demands, Engines, Resources
from cxl_offload.sim.timeline import Timeline
from cxl_offload.sim.trace import Trace
from cxl_offload.sim.work import Work
from cxl_offload.topology import Machine


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
    starts, ends, step_seconds = _times(columns, demands, rates)
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


def _times(
    columns: Columns, demands: Sequence[Demands], rates: Rates
) -> tuple[Floats, Floats, Floats]:
    """Begin and end of every event, and the seconds of every step in the order of the steps."""
    order = np.lexsort((columns.queue_of, columns.step_of))
    work = Work.of(columns, demands, order)
    step_of, queue_of = columns.step_of[order], columns.queue_of[order]
    new_step = np.concatenate(([True], step_of[1:] != step_of[:-1]))
    new_queue = new_step | np.concatenate(([True], queue_of[1:] != queue_of[:-1]))
    queue_begins = np.flatnonzero(new_queue)
    step_begins = np.flatnonzero(new_step[queue_begins])
    started, ended, seconds = _C.run_steps(
        setup_s=work.setup_s,
        alone_s=work.alone_s,
        demand_begins=work.demand_begins,
        resources=work.resources,
        shares=work.shares,
        queue_begins=np.append(queue_begins, len(order)),
        step_begins=np.append(step_begins, len(queue_begins)),
        losses=[rates.losses.get(at, 0.0) for at in range(len(rates.names))],
    )
    offsets = np.cumsum(seconds) - seconds
    shift = offsets[np.cumsum(new_step) - 1]
    starts, ends = np.empty(len(order)), np.empty(len(order))
    starts[order], ends[order] = started + shift, ended + shift
    return starts, ends, seconds
