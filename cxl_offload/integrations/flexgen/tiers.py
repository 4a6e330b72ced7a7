"""This package's memory as the source of FlexGen's host tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cxl_offload.integrations.flexgen.places import TierLimit
from cxl_offload.integrations.flexgen.predict import Room
from cxl_offload.memory import NOT_FAULTED_IN, Policy, Session
from cxl_offload.tensor import empty

__all__ = ["MemorySource", "capacities", "room"]

_UNLIMITED = 1 << 62


class MemorySource:
    """A :class:`~cxl_offload.integrations.flexgen.store.TensorSource` over one memory session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Policy, *, pin: bool
    ) -> torch.Tensor:
        """An uninitialised tensor whose pages follow ``policy``."""
        return empty(shape, dtype=dtype, policy=policy, pin=pin, session=self.session)

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        """Bytes of a range on every node, asked from the pages; pages not there are left out."""
        found = self.session.bytes_per_node(address, nbytes)
        return {node: count for node, count in found.items() if node != NOT_FAULTED_IN}

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Keep the tensor's memory from reuse until the work now on ``stream`` is done."""
        owner = self.session.find(tensor.data_ptr())
        if owner is not None:
            owner.record_stream(stream)


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
