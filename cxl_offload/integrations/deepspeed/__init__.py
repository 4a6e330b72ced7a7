"""DeepSpeed's ZeRO-Offload with its host tensors in tiers. The package itself is not edited.

>>> import deepspeed
>>> from cxl_offload.integrations.deepspeed import placement
>>> with placement({"exp_avg": "cxl", "exp_avg_sq": "cxl"}) as placed:
...     engine, *_ = deepspeed.initialize(model=model, config=config)
>>> print(placed.table())

DeepSpeed and torch are loaded by the first name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxl_offload.integrations.deepspeed.attached import AttachedEngine
    from cxl_offload.integrations.deepspeed.kinds import KINDS, KindPolicies, kind_policies
    from cxl_offload.integrations.deepspeed.report import KindRow
    from cxl_offload.integrations.deepspeed.scope import (
        Placed,
        attach,
        placement,
        start_from_environment,
    )

_HOMES = {
    "attached": ("AttachedEngine",),
    "kinds": ("KINDS", "KindPolicies", "kind_policies"),
    "report": ("KindRow",),
    "scope": ("Placed", "attach", "placement", "start_from_environment"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "KINDS",
    "AttachedEngine",
    "KindPolicies",
    "KindRow",
    "Placed",
    "attach",
    "kind_policies",
    "placement",
    "start_from_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
