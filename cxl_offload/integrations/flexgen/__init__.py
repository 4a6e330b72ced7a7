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
    from cxl_offload.integrations.fit import TierLimit as TierLimit
    from cxl_offload.integrations.flexgen.loaded_model import LoadedModel as LoadedModel
    from cxl_offload.integrations.flexgen.loaded_model import run as run
    from cxl_offload.integrations.flexgen.places import FlexGenKind as FlexGenKind
    from cxl_offload.integrations.flexgen.places import parse_place as parse_place
    from cxl_offload.integrations.flexgen.report import BYPASSES as BYPASSES
    from cxl_offload.integrations.flexgen.report import FlexGenReport as FlexGenReport
    from cxl_offload.integrations.flexgen.request import FlexGenRun as FlexGenRun
    from cxl_offload.integrations.flexgen.seeded import DEMO_SHAPE as DEMO_SHAPE
    from cxl_offload.integrations.flexgen.seeded import OptShape as OptShape
    from cxl_offload.integrations.flexgen.seeded import make_opt as make_opt
    from cxl_offload.integrations.flexgen.shares import ShareRow as ShareRow
    from cxl_offload.integrations.named_tiers import parse_tier as parse_tier

__getattr__, __dir__ = lazy_names(__name__)
