"""What carries plans to tensors: recording how objects are used, sharing a machine among ranks.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxl_offload.executor.ranks import RankShare, share_machine
    from cxl_offload.executor.record import Recording, record

__all__ = ["RankShare", "Recording", "record", "share_machine"]

_HOME_OF = {
    "RankShare": "ranks",
    "Recording": "record",
    "record": "record",
    "share_machine": "ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cxl_offload.executor.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
