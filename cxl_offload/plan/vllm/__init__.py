"""Plans for vLLM: weights and KV blocks off the GPU."""

from __future__ import annotations

from cxl_offload.plan.executor_rules import ExecutorRules
from cxl_offload.plan.vllm.kv_dtype import VLLM_KV_DTYPES

RULES = ExecutorRules(kv_dtype=VLLM_KV_DTYPES)
