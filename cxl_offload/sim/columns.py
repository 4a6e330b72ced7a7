"""A trace turned into columns, so that demands are worked out for thousands of events at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cxl_offload.arrays import Floats, Integers
from cxl_offload.sim.trace import Engine, Event


class Kind(NamedTuple):
    """What events have in common that differ in sizes alone."""

    engine: Engine
    tensor_kind: str
    cpus: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Events of one kind.

    Attributes
    ----------
    events
        int64 ``(n,)``: their numbers in the trace, ascending.
    amounts
        float64 ``(n, reads + writes + 2)``: bytes read from each node, bytes written to each,
        bytes in accelerator memory, floating point operations.
    """

    kind: Kind
    events: Integers
    amounts: Floats

    @property
    def host_bytes(self) -> Floats:
        """float64 ``(n,)``: bytes of host memory read and written."""
        return np.asarray(self.amounts[:, :-2].sum(axis=1), dtype=np.float64)

    def node_bytes(self) -> dict[int, int]:
        """Node -> bytes read and written there."""
        totals = self.amounts[:, :-2].astype(np.int64).sum(axis=0).tolist()
        found: dict[int, int] = {}
        for node, total in zip((*self.kind.reads, *self.kind.writes), totals, strict=True):
            found[node] = found.get(node, 0) + total
        return found


@dataclass(frozen=True, slots=True)
class Columns:
    """Every event's phase, step, queue and kind as whole numbers.

    ``phases`` and ``queues`` are names in the order in which they first appear; ``phase_of``,
    ``queue_of`` and ``kind_of`` (an index into ``groups``) and ``step_of`` are int64
    ``(events,)``.
    """

    phases: tuple[str, ...]
    queues: tuple[str, ...]
    groups: tuple[Group, ...]
    phase_of: Integers
    queue_of: Integers
    step_of: Integers
    kind_of: Integers

    @classmethod
    def of(cls, events: Sequence[Event]) -> Columns:
        """The columns of events in the order in which they were issued."""
        phases: dict[str, int] = {}
        queues: dict[str, int] = {}
        kinds: dict[tuple[object, ...], int] = {}
        amounts: list[list[float]] = []
        phase_of, queue_of, step_of, kind_of = [], [], [], []
        for event in events:
            phase_of.append(phases.setdefault(event.phase, len(phases)))
            queue_of.append(queues.setdefault(event.queue, len(queues)))
            step_of.append(event.step)
            reads, writes = event.read_bytes, event.write_bytes
            key = (event.engine, event.tensor_kind, event.cpus, (*reads,), (*writes,))
            kind = kinds.setdefault(key, len(kinds))
            if kind == len(amounts):
                amounts.append([])
            kind_of.append(kind)
            amounts[kind] += (
                *reads.values(), *writes.values(), event.accelerator_bytes, event.flops
            )  # fmt: skip
        numbers = np.array(kind_of, dtype=np.int64)
        by_kind = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(kinds)))
        groups = [
            Group(Kind(*key), found, np.array(sizes, dtype=np.float64).reshape(len(found), -1))  # type: ignore[arg-type]
            for key, found, sizes in zip(kinds, np.split(by_kind, ends[:-1]), amounts, strict=True)
        ]
        return cls(
            phases=tuple(phases),
            queues=tuple(queues),
            groups=tuple(groups),
            phase_of=np.array(phase_of, dtype=np.int64),
            queue_of=np.array(queue_of, dtype=np.int64),
            step_of=np.array(step_of, dtype=np.int64),
            kind_of=numbers,
        )
