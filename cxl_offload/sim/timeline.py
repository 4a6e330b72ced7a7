"""What a replay found: when everything happened, and how busy every resource was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cxl_offload.sim.resources import Demand
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import Machine

__all__ = ["Timeline"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Simulated times of a trace on a machine. Nothing in it is measured.

    Attributes
    ----------
    machine
        Name of the machine.
    trace
        What was replayed.
    starts_s, ends_s
        float64 ``(events,)``: seconds from the begin; an event's set-up counts as part of it.
    seconds
        Of all steps together.
    phase_seconds
        Phase -> seconds of its steps. A step with several phases counts for the one that ends it.
    queue_seconds, engine_seconds
        Queue, engine -> seconds in which it had an event under way, summed over its events.
    resource_seconds
        Phase -> resource -> seconds that its events would occupy it with nothing else to wait for:
        the resource with most of them is what bounds the phase.
    node_bytes
        Node -> bytes read and written there.
    link_bytes
        ``h2d``, ``d2h`` -> bytes over the GPU's link.
    tokens_per_s
        Phase -> tokens a second, for the phases whose tokens the trace counts.
    """

    machine: str
    trace: Trace
    starts_s: Floats
    ends_s: Floats
    seconds: float
    phase_seconds: Mapping[str, float]
    queue_seconds: Mapping[str, float]
    engine_seconds: Mapping[str, float]
    resource_seconds: Mapping[str, Mapping[str, float]]
    node_bytes: Mapping[int, int]
    link_bytes: Mapping[str, int]
    tokens_per_s: Mapping[str, float]

    @classmethod
    def of(
        cls,
        trace: Trace,
        machine: Machine,
        names: Sequence[str],
        demands: Sequence[Demand],
        numbers: NDArray[np.int64],
        starts: Floats,
        ends: Floats,
        order: Sequence[int],
        step_seconds: Floats,
    ) -> Timeline:
        """Sums over the events of a replay; ``numbers`` says which demand each event has."""
        phases = _phase_seconds(trace, ends, order, step_seconds)
        queues: dict[str, float] = {}
        engines: dict[str, float] = {}
        links = {"h2d": 0, "d2h": 0}
        uses: dict[str, dict[int, int]] = {}
        for event, number, length in zip(
            trace, numbers.tolist(), (ends - starts).tolist(), strict=True
        ):
            queues[event.queue] = queues.get(event.queue, 0.0) + length
            engines[event.engine] = engines.get(event.engine, 0.0) + length
            count = uses.setdefault(event.phase, {})
            count[number] = count.get(number, 0) + 1
            if event.engine in links:
                links[event.engine] += event.host_bytes or event.accelerator_bytes
        return cls(
            machine=machine.name,
            trace=trace,
            starts_s=starts,
            ends_s=ends,
            seconds=float(step_seconds.sum()),
            phase_seconds=phases,
            queue_seconds=queues,
            engine_seconds=engines,
            resource_seconds={p: _occupied(count, demands, names) for p, count in uses.items()},
            node_bytes=trace.bytes_per_node(),
            link_bytes=links,
            tokens_per_s={
                phase: count / phases[phase]
                for phase, count in trace.tokens.items()
                if phases.get(phase, 0.0) > 0
            },
        )

    def bottleneck(self, phase: str) -> str:
        """The resource that would be busy longest in a phase, were there nothing to wait for."""
        busy = self.resource_seconds[phase]
        return max(busy, key=lambda name: busy[name]) if busy else "set-up of copies"

    def utilisation(self, phase: str) -> dict[str, float]:
        """Resource -> share of the phase's time in which it was busy, 0 to 1."""
        seconds = self.phase_seconds.get(phase, 0.0)
        if seconds <= 0:
            return {}
        return {name: busy / seconds for name, busy in self.resource_seconds[phase].items()}

    def to_json(self) -> dict[str, Any]:
        """Everything but the single events, as plain data."""
        return {
            "kind": "simulated",
            "machine": self.machine,
            "seconds": self.seconds,
            "events": len(self.trace),
            "phase_seconds": dict(self.phase_seconds),
            "queue_seconds": dict(self.queue_seconds),
            "engine_seconds": dict(self.engine_seconds),
            "resource_seconds": {p: dict(busy) for p, busy in self.resource_seconds.items()},
            "bottleneck": {phase: self.bottleneck(phase) for phase in self.resource_seconds},
            "node_bytes": {str(node): count for node, count in self.node_bytes.items()},
            "link_bytes": dict(self.link_bytes),
            "tokens_per_s": dict(self.tokens_per_s),
        }


def _phase_seconds(
    trace: Trace, ends: Floats, order: Sequence[int], step_seconds: Floats
) -> dict[str, float]:
    last: dict[int, tuple[float, str]] = {}
    for event, end in zip(trace, ends.tolist(), strict=True):
        known = last.get(event.step)
        if known is None or end >= known[0]:
            last[event.step] = (end, event.phase)
    phases = dict.fromkeys((event.phase for event in trace), 0.0)
    for step, seconds in zip(order, step_seconds.tolist(), strict=True):
        phases[last[step][1]] += seconds
    return phases


def _occupied(
    count: Mapping[int, int], demands: Sequence[Demand], names: Sequence[str]
) -> dict[str, float]:
    total: dict[str, float] = {}
    for number, times in count.items():
        for resource, seconds in demands[number].items():
            total[names[resource]] = total.get(names[resource], 0.0) + times * seconds
    return dict(sorted(total.items()))
