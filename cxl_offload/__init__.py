"""LLM tensor offloading over DRAM and CXL memory tiers.

``import cxl_offload`` loads neither torch nor the C++ core; the names below, and the rooms of the
package (``cxl_offload.plan``), load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names, refuse_core_in_subinterpreters
from cxl_offload.renamed import remember_gone_modules

if TYPE_CHECKING:
    from cxl_offload import (
        integrations,
        memory,
        metrics,
        objects,
        ops,
        plan,
        profile,
        ranks,
        sim,
        topology,
        transfer,
        tune,
        validation,
    )
    from cxl_offload.errors import ConfigError, CxlOffloadError, MemoryLostError, PlacementError
    from cxl_offload.memory import (
        Bind,
        Dax,
        FirstTouch,
        Interleave,
        Placement,
        Preferred,
        Replicate,
        Session,
        SharedRegion,
        Weighted,
        current_session,
        survive_memory_errors,
        use,
    )
    from cxl_offload.objects.module_placement import place
    from cxl_offload.objects.placing_scope import placing
    from cxl_offload.objects.tensor_holders import memory_report
    from cxl_offload.ops.activations import offload_activations
    from cxl_offload.ops.adagrad import CPUAdagrad
    from cxl_offload.ops.adam import CPUAdam
    from cxl_offload.ops.attention import decode_attention
    from cxl_offload.ops.lion import CPULion
    from cxl_offload.ops.offload import offload_optimizer
    from cxl_offload.tensor import (
        empty,
        empty_like,
        from_tensor,
        full,
        move,
        placement_of,
        record_stream,
        stats,
        zeros,
    )
    from cxl_offload.topology import discover, load_machine

__version__ = "0.1.0"

__all__ = [
    "Bind",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "ConfigError",
    "CxlOffloadError",
    "Dax",
    "FirstTouch",
    "Interleave",
    "MemoryLostError",
    "Placement",
    "PlacementError",
    "Preferred",
    "Replicate",
    "Session",
    "SharedRegion",
    "Weighted",
    "current_session",
    "decode_attention",
    "discover",
    "empty",
    "empty_like",
    "from_tensor",
    "full",
    "integrations",
    "load_machine",
    "memory",
    "memory_report",
    "metrics",
    "move",
    "objects",
    "offload_activations",
    "offload_optimizer",
    "ops",
    "place",
    "placement_of",
    "placing",
    "plan",
    "profile",
    "ranks",
    "record_stream",
    "sim",
    "stats",
    "survive_memory_errors",
    "topology",
    "transfer",
    "tune",
    "use",
    "validation",
    "zeros",
]

refuse_core_in_subinterpreters(__name__)
remember_gone_modules()
__getattr__, __dir__ = lazy_names(__name__)
