"""How far the equations are from published numbers, by executor.

The figures are those of ``cxl-offload validate`` over the shipped cases; a test computes them
again.
"""

from __future__ import annotations

from cxl_offload.plan.plan_file import ErrorEstimate

FLEXGEN_ERROR = ErrorEstimate(
    cases=3,
    median=0.1451,
    worst=0.1830,
    source="tokens/s of stock FlexGen on its own T4 machine, OPT-6.7B to OPT-175B, planned by "
    "these equations (validate, plans.json)",
)

VLLM_ERROR = ErrorEstimate(
    cases=46,
    median=0.0679,
    worst=0.3904,
    source="tokens/s: LLaMA3-70B on one H100 with DIMM; models that fit on an A10G, L4, RTX 4090, "
    "A100 or H100, a quarter of them fitted to (validate, group vllm_weight_offload, and "
    "plans.json)",
)

UNKNOWN_ERROR = (
    "nobody has published speeds of this engine, so how far off this prediction is, is not known"
)
"""Said of plans for engines that no published case is about."""
