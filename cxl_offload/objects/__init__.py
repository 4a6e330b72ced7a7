"""Tensors by name and kind: how often a program uses each, where each lies, what of each there is.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.objects.held_memory import HeldTensor as HeldTensor
    from cxl_offload.objects.held_memory import MemoryHolder as MemoryHolder
    from cxl_offload.objects.held_memory import MemoryReport as MemoryReport
    from cxl_offload.objects.held_memory import report_of_process as report_of_process
    from cxl_offload.objects.placement_rows import PlacementRow as PlacementRow
    from cxl_offload.objects.recording import Recording as Recording
    from cxl_offload.objects.recording import record as record
    from cxl_offload.objects.tensor_holders import memory_report as memory_report

__getattr__, __dir__ = lazy_names(__name__)
