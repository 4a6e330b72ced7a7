"""DeepSpeed's ZeRO-Offload with its host tensors in tiers. The package itself is not edited.

>>> import deepspeed
>>> from cxl_offload.integrations.deepspeed import placing
>>> with placing({"exp_avg": "cxl", "exp_avg_sq": "cxl"}) as placed:
...     engine, *_ = deepspeed.initialize(model=model, config=config)
>>> print(placed.table())

DeepSpeed and torch are loaded by the first name that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.integrations.deepspeed.attached import AttachedEngine as AttachedEngine
    from cxl_offload.integrations.deepspeed.kinds import KINDS as KINDS
    from cxl_offload.integrations.deepspeed.kinds import KindPolicies as KindPolicies
    from cxl_offload.integrations.deepspeed.kinds import kind_policies as kind_policies
    from cxl_offload.integrations.deepspeed.report import KindRow as KindRow
    from cxl_offload.integrations.deepspeed.scope import Placed as Placed
    from cxl_offload.integrations.deepspeed.scope import attach as attach
    from cxl_offload.integrations.deepspeed.scope import placing as placing
    from cxl_offload.integrations.deepspeed.scope import (
        start_from_environment as start_from_environment,
    )

__getattr__, __dir__ = lazy_names(__name__)
