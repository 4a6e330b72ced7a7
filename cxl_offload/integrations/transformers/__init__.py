"""Decoders of Hugging Face transformers with their weights and KV cache in tiers.

>>> from cxl_offload.integrations.transformers import load, offload
>>> model = load("path/to/model", {"weights": "weighted:ldram=2,cxl=1"})
>>> with offload(model, {"kv": "bind:cxl"}):
...     model.generate(**inputs, max_new_tokens=64)

torch and transformers are loaded by the first name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.attention import AttentionCalls as AttentionCalls
    from cxl_offload.integrations.transformers.generation import GenerateReport as GenerateReport
    from cxl_offload.integrations.transformers.generation import GenerateRun as GenerateRun
    from cxl_offload.integrations.transformers.generation import run as run
    from cxl_offload.integrations.transformers.loading import load as load
    from cxl_offload.integrations.transformers.prefix_options import KeptPrefixes as KeptPrefixes
    from cxl_offload.integrations.transformers.prefix_options import PrefixCounts as PrefixCounts
    from cxl_offload.integrations.transformers.ranked import Divided as Divided
    from cxl_offload.integrations.transformers.ranked import RankPart as RankPart
    from cxl_offload.integrations.transformers.ranked import session_of as session_of
    from cxl_offload.integrations.transformers.run_checks import RunTuning as RunTuning
    from cxl_offload.integrations.transformers.scope import Offloaded as Offloaded
    from cxl_offload.integrations.transformers.scope import offload as offload

__getattr__, __dir__ = lazy_names(__name__)
