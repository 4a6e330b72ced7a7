"""What carries plans to tensors: recording how objects are used.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxl_offload.executor.record import Recording, record

__all__ = ["Recording", "record"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("cxl_offload.executor.record"), name)
    globals()[name] = value
    return value
