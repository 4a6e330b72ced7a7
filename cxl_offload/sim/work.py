"""What is left of events when their bytes have become time, as the core's replay takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cxl_offload.arrays import Floats, Integers
from cxl_offload.sim.columns import Columns
from cxl_offload.sim.resources import Demands


@dataclass(frozen=True, slots=True)
class Work:
    """Set-up and demands of events, one after another.

    Attributes
    ----------
    setup_s, alone_s
        float64 ``(events,)``: set-up, and the largest demand.
    demand_begins
        int64 ``(events + 1,)``: where each event's demands begin in the next two.
    resources, shares
        int32 and float64: resource numbers, and demands as parts of the event's largest, above 0.
    """

    setup_s: Floats
    alone_s: Floats
    demand_begins: Integers
    resources: NDArray[np.int32]
    shares: Floats

    @classmethod
    def of(cls, columns: Columns, demands: Sequence[Demands], order: Integers) -> Work:
        """The work of a trace's demands, which are in the order of its kinds.

        Parameters
        ----------
        order
            int64 ``(events,)``: the events in the order in which the result has them.
        """
        count = len(order)
        setup, alone = np.zeros(count), np.zeros(count)
        place = np.empty(count, dtype=np.int64)
        place[order] = np.arange(count)
        owners, resources, shares = [], [], []
        for group, demand in zip(columns.groups, demands, strict=True):
            at = place[group.events]
            largest = demand.seconds.max(axis=1, initial=0.0)
            setup[at] = demand.setup_s
            alone[at] = largest
            parts = demand.seconds / np.where(largest > 0, largest, 1.0)[:, None]
            rows, used = np.nonzero(parts)
            owners.append(at[rows])
            resources.append(np.array(demand.resources, dtype=np.int32)[used])
            shares.append(parts[rows, used])
        owner = np.concatenate(owners)
        by_owner = np.argsort(owner, kind="stable")
        begins = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(np.bincount(owner, minlength=count), out=begins[1:])
        return cls(
            setup,
            alone,
            begins,
            np.concatenate(resources)[by_owner],
            np.concatenate(shares)[by_owner],
        )
