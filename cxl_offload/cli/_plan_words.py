"""Kinds of tensors and homes of a plan in words, for people who do not know the codes yet."""

from __future__ import annotations

PLACES = {
    "gpu": "GPU",
    "ldram": "local DRAM",
    "rdram": "DRAM of the other socket",
    "hbm": "HBM",
    "cxl": "CXL memory",
    "nvme": "drive",
}
"""By the names of tiers."""

KINDS = {
    "kv": "keys and values (kv)",
    "act": "hidden states (act)",
    "workspace": "working memory of the CPUs",
    "mlp": "weights of MLPs",
    "attention": "weights of attention",
    "experts": "weights of experts",
    "fp32_master": "fp32 weights (fp32_master)",
    "fp32_grad": "fp32 gradients (fp32_grad)",
    "exp_avg": "momentum (exp_avg)",
    "exp_avg_sq": "variance (exp_avg_sq)",
    "staging": "buffers of copies (staging)",
    "params": "half-precision weights (params)",
}
"""By the names that a plan and ``--place`` have for them."""
