"""Adapters that put other frameworks' tensors into the tiers of this package, one folder each.

An adapter, and its framework, is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.integrations import deepspeed as deepspeed
    from cxl_offload.integrations import flexgen as flexgen
    from cxl_offload.integrations import transformers as transformers
    from cxl_offload.integrations import vllm as vllm

__getattr__, __dir__ = lazy_names(__name__)
