"""Plans for ZeRO-Offload: a step's time, and the home of every kind of tensor."""

from __future__ import annotations

from cxl_offload.plan.equations.adam_bytes import STATE_TYPES
from cxl_offload.plan.executor_rules import ExecutorRules

RULES = ExecutorRules(kind=("training",), state_dtype=STATE_TYPES, checkpointing=(True,))
