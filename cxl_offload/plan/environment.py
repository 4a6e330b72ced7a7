"""How a program is told the plan whose tensors its processes place."""

from __future__ import annotations

PLAN_VARIABLE = "CXL_OFFLOAD_PLAN"
"""Of the environment: the path of a plan, or policies of kinds."""
