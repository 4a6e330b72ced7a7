"""Plans for this package's integration with Hugging Face transformers: policies by kind."""

from __future__ import annotations

from cxl_offload.plan.executor_rules import ExecutorRules
from cxl_offload.plan.kv_types import KV_TYPES

RULES = ExecutorRules(kv_dtype=KV_TYPES)
