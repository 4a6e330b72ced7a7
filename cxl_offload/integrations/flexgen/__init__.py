"""FlexGen 0.1.8 with its host memory in tiers. The package itself is not edited.

>>> from cxl_offload.integrations.flexgen import FlexGenRun, run
>>> report = run(FlexGenRun(model="path/to/opt", prompts=("Paris is",), gpu_batch_size=1,
...                         place={"weights": "weighted:ldram=2,cxl=1", "kv": "bind:cxl"}))

torch, transformers and FlexGen are loaded by the first name that needs them; requests do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxl_offload.integrations.flexgen.places import Role, TierLimit, parse_place, parse_tier
    from cxl_offload.integrations.flexgen.report import BYPASSES, FlexGenReport, PlacementRow
    from cxl_offload.integrations.flexgen.request import FlexGenRun
    from cxl_offload.integrations.flexgen.seeded import DEMO_SHAPE, OptShape, make_opt
    from cxl_offload.integrations.flexgen.session import Session, run
    from cxl_offload.integrations.flexgen.shares import ShareRow

_HOMES = {
    "places": ("Role", "TierLimit", "parse_place", "parse_tier"),
    "report": ("BYPASSES", "FlexGenReport", "PlacementRow"),
    "request": ("FlexGenRun",),
    "seeded": ("DEMO_SHAPE", "OptShape", "make_opt"),
    "session": ("Session", "run"),
    "shares": ("ShareRow",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BYPASSES",
    "DEMO_SHAPE",
    "FlexGenReport",
    "FlexGenRun",
    "OptShape",
    "PlacementRow",
    "Role",
    "Session",
    "ShareRow",
    "TierLimit",
    "make_opt",
    "parse_place",
    "parse_tier",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
