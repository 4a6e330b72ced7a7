"""Tensors by name and kind: how often a program uses each, where each lies, what of each there is.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.objects.held_memory import (
        HeldTensor,
        MemoryHolder,
        MemoryReport,
        report_of_process,
    )
    from cxl_offload.objects.placement_rows import PlacementRow
    from cxl_offload.objects.recording import Recording, record
    from cxl_offload.objects.tensor_holders import memory_report

__all__ = [
    "HeldTensor",
    "MemoryHolder",
    "MemoryReport",
    "PlacementRow",
    "Recording",
    "memory_report",
    "record",
    "report_of_process",
]

__getattr__, __dir__ = lazy_names(__name__)
