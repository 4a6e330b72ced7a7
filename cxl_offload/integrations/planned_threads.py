"""The threads of a plan, as a run of it can have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cxl_offload.memory import Session
from cxl_offload.plan.plan_file import Plan


@dataclass(frozen=True, slots=True)
class PlannedThreads:
    """Threads by the node that they read, for teams of the kernels; None: as many as torch has.

    ``notes`` say why a plan's are not taken.
    """

    counts: Mapping[int, int] | None = None
    notes: tuple[str, ...] = ()


def planned_threads(plan: Plan | None, session: Session) -> PlannedThreads:
    """What a run takes of its plan's threads.

    Threads of one node are no team of their own: kernels then run on torch's threads, which need
    not be woken. A simulated node has no CPUs of its own, so nothing is said of it.
    """
    planned = {} if plan is None else plan.threads
    if not planned:
        return PlannedThreads()
    have = {node.id for node in session.machine.nodes}
    away = sorted(set(planned) - have)
    if away:
        return PlannedThreads(None, (f"the plan's threads are not taken: no node {away[0]} here",))
    if session.is_simulated:
        return PlannedThreads()
    count, running = sum(planned.values()), torch.get_num_threads()
    if count != running:
        said = (
            f"the plan's threads are not taken: it counts with {count}, and torch has {running} "
            f"here; with OMP_NUM_THREADS={count} it has as many"
        )
        return PlannedThreads(None, (said,))
    return PlannedThreads(planned if len(planned) > 1 else None)
