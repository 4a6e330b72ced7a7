"""What a replay found: when everything happened, and how busy every resource was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cxl_offload.arrays import Floats, Integers
from cxl_offload.sim.columns import Columns
from cxl_offload.sim.resources import Demands
from cxl_offload.sim.trace import Trace


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
        the resource with most of them bounds the phase.
    node_bytes
        Node -> bytes read and written there.
    link_bytes
        ``h2d``, ``d2h`` -> bytes over the GPU's link.
    tokens_per_s
        Phase -> tokens a second, for the phases whose tokens the trace counts.
    node_bandwidth_bytes_per_s
        Node -> the most that is known to reach it, for the nodes of which anything is known.
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
    node_bandwidth_bytes_per_s: Mapping[int, float]

    # Long, with many parameters: what a replay knows, by keyword for its one caller.
    @classmethod
    def of(
        cls,
        trace: Trace,
        *,
        machine: str,
        columns: Columns,
        demands: Sequence[Demands],
        names: Sequence[str],
        node_rates: Mapping[int, float | None],
        starts: Floats,
        ends: Floats,
        step_seconds: Floats,
    ) -> Timeline:
        """Sums over the events of a replay; ``step_seconds`` are in the order of the steps."""
        phases = _phase_seconds(columns, ends, step_seconds)
        lengths = ends - starts
        queues = np.bincount(columns.queue_of, lengths, len(columns.queues)).tolist()
        engines: dict[str, float] = {}
        links = {"h2d": 0, "d2h": 0}
        nodes: dict[int, int] = {}
        for group in columns.groups:
            engine = group.kind.engine
            engines[engine] = engines.get(engine, 0.0) + float(lengths[group.events].sum())
            for node, count in group.node_bytes().items():
                nodes[node] = nodes.get(node, 0) + count
            if engine in links:
                moved = np.where(group.host_bytes > 0, group.host_bytes, group.amounts[:, -2])
                links[engine] += int(moved.astype(np.int64).sum())
        return cls(
            machine=machine,
            trace=trace,
            starts_s=starts,
            ends_s=ends,
            seconds=float(step_seconds.sum()),
            phase_seconds=phases,
            queue_seconds=dict(zip(columns.queues, queues, strict=True)),
            engine_seconds=engines,
            resource_seconds=_occupied(columns, demands, names),
            node_bytes=dict(sorted(nodes.items())),
            link_bytes=links,
            tokens_per_s={
                phase: count / phases[phase]
                for phase, count in trace.tokens.items()
                if phases.get(phase, 0.0) > 0
            },
            node_bandwidth_bytes_per_s={
                node: rate for node, rate in node_rates.items() if rate is not None
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

    def phase_shares(self) -> dict[str, float]:
        """Phase -> its part of the whole time, 0 to 1."""
        if self.seconds <= 0:
            return dict.fromkeys(self.phase_seconds, 0.0)
        return {phase: part / self.seconds for phase, part in self.phase_seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """Everything but the single events, as plain data."""
        return {
            "kind": "simulated",
            "machine": self.machine,
            "seconds": self.seconds,
            "events": len(self.trace),
            "phase_seconds": dict(self.phase_seconds),
            "phase_shares": self.phase_shares(),
            "queue_seconds": dict(self.queue_seconds),
            "engine_seconds": dict(self.engine_seconds),
            "resource_seconds": {p: dict(busy) for p, busy in self.resource_seconds.items()},
            "utilisation": {phase: self.utilisation(phase) for phase in self.resource_seconds},
            "bottleneck": {phase: self.bottleneck(phase) for phase in self.resource_seconds},
            "node_bytes": {str(node): count for node, count in self.node_bytes.items()},
            "link_bytes": dict(self.link_bytes),
            "tokens_per_s": dict(self.tokens_per_s),
        }


def _phase_seconds(columns: Columns, ends: Floats, step_seconds: Floats) -> dict[str, float]:
    """Every step's seconds go to the phase of the event that ends last, of several to the last."""
    steps, at = np.unique(columns.step_of, return_inverse=True)
    last = np.lexsort((np.arange(len(ends)), ends, at))
    ending = last[np.searchsorted(at[last], np.arange(len(steps)), side="right") - 1]
    totals = np.bincount(columns.phase_of[ending], step_seconds, len(columns.phases))
    return dict(zip(columns.phases, totals.tolist(), strict=True))


def _occupied(
    columns: Columns, demands: Sequence[Demands], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    phases = len(columns.phases)
    totals = np.zeros((phases, len(names)))
    for group, demand in zip(columns.groups, demands, strict=True):
        phase: Integers = columns.phase_of[group.events]
        for column, resource in enumerate(demand.resources):
            totals[:, resource] += np.bincount(phase, demand.seconds[:, column], phases)
    return {
        phase: {
            name: total
            for name, total in sorted(zip(names, row.tolist(), strict=True))
            if total > 0
        }
        for phase, row in zip(columns.phases, totals, strict=True)
    }
