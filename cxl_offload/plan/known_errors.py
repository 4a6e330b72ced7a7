"""How far the equations are from published numbers, by executor.

The figures are those of ``cxl-offload validate`` over the shipped cases; a test computes them
again.
"""

from __future__ import annotations

from cxl_offload.plan.plan_file import ErrorEstimate

FLEXGEN_ERROR = ErrorEstimate(
    cases=5,
    median=0.0667,
    worst=0.1429,
    source="batch sizes that fit and that a search chooses (validate, group flexgen_search); no "
    "absolute FlexGen speed is published for these machines, ratios between them are in range",
)

VLLM_ERROR = ErrorEstimate(
    cases=10,
    median=0.0814,
    worst=0.2046,
    source="tokens/s: LLaMA3-70B on one H100 with DIMM; models that fit on an A10G, L4 or A100 "
    "(validate, group vllm_weight_offload, and plans.json)",
)
