"""How events that run at the same time share resources: max-min fairness on every bottleneck.

The computation is the core's (``csrc/replay/sharing.h`` says the rules); this is its face for one
moment of a replay. A congested resource (:class:`cxl_offload.sim.fabric.SwitchLink`) has less to
share when it is offered more than it carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxl_offload import _C
from cxl_offload.sim.resources import Demand


def speeds(demands: Sequence[Demand], losses: Mapping[int, float] | None = None) -> list[float]:
    """Speed of each of several events, 1 where nothing holds it up but its own largest demand.

    Parameters
    ----------
    demands
        Seconds of every event on its resources, each with a largest demand above 0.
    losses
        Resource -> largest share of it that congestion costs.

    Returns
    -------
    list of float
        ``s`` in (0, 1]: the event takes ``1 / s`` times its largest demand. An event below 1 has a
        resource that is fully used and of which nobody has more than it.
    """
    losses = losses or {}
    jobs = []
    for demand in demands:
        largest = max(demand.values())
        jobs.append([(resource, part / largest) for resource, part in demand.items() if part > 0])
    count = 1 + max((resource for job in jobs for resource, _ in job), default=0)
    return _C.share_resources(jobs, [losses.get(resource, 0.0) for resource in range(count)])
