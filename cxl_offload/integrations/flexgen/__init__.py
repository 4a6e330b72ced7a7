"""FlexGen 0.1.8 with its host memory in tiers. The package itself is not edited.

>>> from cxl_offload.integrations.flexgen import FlexGenRun, run
>>> report = run(FlexGenRun(model="path/to/opt", prompts=("Paris is",), gpu_batch_size=1,
...                         place={"weights": "weighted:ldram=2,cxl=1", "kv": "bind:cxl"}))

torch, transformers and FlexGen are loaded by the first name that needs them; requests do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.integrations.fit import TierLimit
    from cxl_offload.integrations.flexgen.loaded_model import LoadedModel, run
    from cxl_offload.integrations.flexgen.places import FlexGenKind, parse_place
    from cxl_offload.integrations.flexgen.report import BYPASSES, FlexGenReport
    from cxl_offload.integrations.flexgen.request import FlexGenRun
    from cxl_offload.integrations.flexgen.seeded import DEMO_SHAPE, OptShape, make_opt
    from cxl_offload.integrations.flexgen.shares import ShareRow
    from cxl_offload.integrations.named_tiers import parse_tier

__all__ = [
    "BYPASSES",
    "DEMO_SHAPE",
    "FlexGenKind",
    "FlexGenReport",
    "FlexGenRun",
    "LoadedModel",
    "OptShape",
    "ShareRow",
    "TierLimit",
    "make_opt",
    "parse_place",
    "parse_tier",
    "run",
]

__getattr__, __dir__ = lazy_names(__name__)
