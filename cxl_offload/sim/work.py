"""What is left of events when their bytes have become time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cxl_offload.sim.columns import Columns, Floats, Integers
from cxl_offload.sim.resources import Demands

__all__ = ["DUST", "Work"]

DUST = 1e-12
"""What subtraction leaves of a time that is over, as a part of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """Set-up and demands of every event of a trace.

    Attributes
    ----------
    setup_s, alone_s
        float64 ``(events,)``: set-up, and the largest demand.
    kind_of, row_of
        int64 ``(events,)``: an event's kind and its place among the events of that kind.
    resources
        Kind -> resource numbers.
    shares
        Kind -> float64 ``(n, resources)``: demands as parts of the largest one.
    losses
        Resource -> what congestion costs of it.
    """

    setup_s: Floats
    alone_s: Floats
    kind_of: Integers
    row_of: Integers
    resources: Sequence[tuple[int, ...]]
    shares: Sequence[Floats]
    losses: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Columns, demands: Sequence[Demands], losses: Mapping[int, float]) -> Work:
        """The work of a trace's demands, which are in the order of its kinds."""
        count = len(columns.kind_of)
        setup, alone = np.zeros(count), np.zeros(count)
        row_of = np.zeros(count, dtype=np.int64)
        shares = []
        for group, demand in zip(columns.groups, demands, strict=True):
            largest = demand.seconds.max(axis=1, initial=0.0)
            setup[group.events] = demand.setup_s
            alone[group.events] = largest
            row_of[group.events] = np.arange(len(group.events))
            shares.append(demand.seconds / np.where(largest > 0, largest, 1.0)[:, None])
        resources = [demand.resources for demand in demands]
        return cls(setup, alone, columns.kind_of, row_of, resources, shares, losses)
