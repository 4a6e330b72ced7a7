"""Optimizer states of the type that a plan counts on, set before they are made."""

from __future__ import annotations

import logging

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.ops.optimizer import OnePassOptimizer

_LOG = logging.getLogger(__name__)


def keep_states_as(inner: torch.optim.Optimizer, name: str) -> bool:
    """Has an optimizer of this package keep its states in a type; no name: as it was told.

    DeepSpeed makes no states before the first step. Those that a checkpoint brought before are
    converted; both are in memory for that long.

    Returns
    -------
    bool
        Whether states were exchanged.

    Raises
    ------
    ConfigError
        Another optimizer, whose states would need more memory than was planned.
    """
    if not name:
        return False
    dtype: torch.dtype = getattr(torch, name)
    if not isinstance(inner, OnePassOptimizer):
        raise ConfigError(
            f"the plan counts on optimizer states in {name}, which {type(inner).__name__} does not "
            "have: give cxl_offload.CPUAdam, or plan without --state-dtype"
        )
    if inner.state_dtype is dtype:
        return False
    if inner.state_dtype is not torch.float32:  # which is what nobody asked for
        _LOG.warning(
            "the plan's optimizer states in %s are kept, not those in %s that the script gives %s",
            name,
            str(inner.state_dtype).removeprefix("torch."),
            type(inner).__name__,
        )
    loaded = inner.state_dict() if any(inner.state.values()) else None
    inner.state.clear()
    try:
        inner.keep_states_as(dtype)
    except ValueError as error:
        raise ConfigError(f"the plan counts on optimizer states in {name}: {error}") from None
    finally:
        if loaded is not None:
            inner.load_state_dict(loaded)
    return loaded is not None
