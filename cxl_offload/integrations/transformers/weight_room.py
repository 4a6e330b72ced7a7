"""Whether the nodes have room for the weights of a checkpoint, before one of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from cxl_offload.integrations.fit import Need, check_fit, room
from cxl_offload.integrations.transformers.weights import meta_model, staying, weight_bytes
from cxl_offload.memory import Policy, Session
from cxl_offload.objects.kind_store import TierStore


def weight_needs(
    model: PreTrainedModel,
    folder: str | Path,
    policies: Mapping[str, Policy],
    store: TierStore,
    *,
    divided_by: int = 1,
) -> list[Need]:
    """What the weights of kinds with a policy take at least.

    Parameters
    ----------
    model
        Without its weights.
    folder
        Of its checkpoint.
    store
        Says which weights stay on an accelerator.
    divided_by
        Ranks that divide the weights; none of them has less than its part.
    """
    found = weight_bytes(model, policies, folder, without=staying(store, model))
    return [
        Need(kind, "host", policies[kind], -(-count // divided_by), 1)
        for kind, count in found.items()
        if kind in policies
    ]


def check_weights_fit(
    folder: str | Path,
    policies: Mapping[str, Policy],
    store: TierStore,
    session: Session,
    *,
    dtype: torch.dtype | str,
    distributed: DistributedConfig | None,
) -> None:
    """Refuse a checkpoint that the nodes have no room for; nothing is allocated.

    Raises
    ------
    MemoryError
        Names the node, what it needs by kind, and what it has.
    ConfigError
        No decoder that transformers knows.
    """
    ranks = 1
    if distributed is not None and dist.is_initialized():
        ranks = dist.get_world_size()
    model = meta_model(folder, dtype)
    needs = weight_needs(model, folder, policies, store, divided_by=ranks)
    session.trim()  # what the pool keeps is free for them
    check_fit(needs, room(session))
