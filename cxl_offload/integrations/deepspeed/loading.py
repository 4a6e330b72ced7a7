"""Checkpoints of a script that knows nothing of this package, read as its plan has the states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed

from cxl_offload.integrations.deepspeed import objects
from cxl_offload.integrations.deepspeed.one_line import in_one_line
from cxl_offload.integrations.deepspeed.states import keep_states_as


def keep_loaded_states_as(name: Callable[[Any], str]) -> None:
    """Has engines keep their states in a type before they read a checkpoint of it.

    Without it states in 8 bits would become float32 when they are read, and others than the saved
    ones when the type is set at the first forward pass. DeepSpeed asks nobody before it reads: this
    is a patch of ``DeepSpeedEngine.load_checkpoint``.

    Parameters
    ----------
    name
        Gives the type for an engine, or "".
    """
    load = deepspeed.DeepSpeedEngine.load_checkpoint
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def load_checkpoint(engine: Any, *arguments: Any, **options: Any) -> Any:
        zero = engine.optimizer
        inner = None if zero is None else objects.inner_optimizer(zero)
        if inner is not None:
            with in_one_line():
                if keep_states_as(inner, name(engine)):
                    objects.relink(zero)
        return load(engine, *arguments, **options)

    deepspeed.DeepSpeedEngine.load_checkpoint = load_checkpoint
