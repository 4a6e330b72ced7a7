"""Adapters that put other frameworks' tensors into the tiers of this package, one folder each.

An adapter, and its framework, is loaded when it is first used.
"""

from __future__ import annotations

from cxl_offload.lazy import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {}, modules=("deepspeed", "flexgen", "transformers", "vllm")
)
