"""What tiers and nodes can still take."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.integrations.flexgen.places import TierLimit
from cxl_offload.integrations.flexgen.predict import Room
from cxl_offload.memory import Session
from cxl_offload.renamed import old_names

__getattr__ = old_names(__name__)

_UNLIMITED = 1 << 62


def capacities(limits: Sequence[TierLimit]) -> dict[int, int]:
    """What tiers of one node may hold, as the memory session takes it.

    With it a preferred node spills at the tier's capacity. Tiers of several nodes are left to the
    check before the run: the session counts nodes, not tiers.
    """
    return {
        limit.nodes[0]: limit.capacity_bytes
        for limit in limits
        if len(limit.nodes) == 1 and limit.capacity_bytes is not None
    }


def room(session: Session, limits: Sequence[TierLimit]) -> Room:
    """What the session's nodes can still take.

    Free memory of real nodes is not asked for here: page cache makes it look smaller than it is,
    and the session refuses a full node by itself before the kernel has to.
    """
    held = session.stats().nodes
    free: dict[int, int] = {}
    for node in session.machine.usable_nodes(include_gpu_memory=True):
        use = held.get(node.id)
        taken = 0 if use is None else use.current_bytes
        left = node.capacity_bytes - taken if session.is_simulated else _UNLIMITED
        if use is not None and use.capacity_bytes is not None:
            left = min(left, use.capacity_bytes - taken)
        free[node.id] = left
    return Room(free, limits, session.kernel.local_node)
