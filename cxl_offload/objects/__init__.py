"""Tensors by name and kind: how often a program uses each, where each lies, what of each there is.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.objects.placement_rows import PlacementRow
    from cxl_offload.objects.recording import Recording, record

__all__ = ["PlacementRow", "Recording", "record"]

__getattr__, __dir__ = lazy_names(
    __name__, {"placement_rows": ("PlacementRow",), "recording": ("Recording", "record")}
)
