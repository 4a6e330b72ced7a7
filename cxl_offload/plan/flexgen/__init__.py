"""Plans for FlexGen: its cost model with tiers, the search, and what is printed."""

from __future__ import annotations

from cxl_offload.plan.executor_rules import ExecutorRules

RULES = ExecutorRules()
