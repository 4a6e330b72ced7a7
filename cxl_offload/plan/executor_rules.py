"""What a plan may say for who runs it; the room of each framework has the rules of its own."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

ExecutorName = Literal["flexgen", "deepspeed", "transformers", "vllm"]
"""Who runs a plan."""

_OTHER_ROOMS = {"deepspeed": "training"}
"""Rooms of the planner that have another name than their executor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRules:
    """Fields of a plan that not every executor takes, each with what may stand there.

    They have the names of those of :class:`~cxl_offload.plan.plan_file.Plan`. What is empty or
    false there applies to nobody and is always allowed.
    """

    kind: Collection[str] = ("inference",)
    kv_dtype: Collection[str] = ()
    state_dtype: Collection[str] = ()
    checkpointing: Collection[bool] = ()


def rules_of(executor: ExecutorName) -> ExecutorRules:
    """The rules in the room of an executor, which is loaded by its name: none is known here."""
    room = _OTHER_ROOMS.get(executor, executor)
    rules: ExecutorRules = importlib.import_module(f"cxl_offload.plan.{room}").RULES
    return rules
