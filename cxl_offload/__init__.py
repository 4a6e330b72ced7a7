"""LLM tensor offloading over DRAM and CXL memory tiers.

``import cxl_offload`` loads neither torch nor the C++ core; the names below load what they need
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names
from cxl_offload.renamed import remember_gone_modules

if TYPE_CHECKING:
    from cxl_offload.memory import (
        Bind,
        Dax,
        FirstTouch,
        Interleave,
        Placement,
        Preferred,
        Session,
        Weighted,
        use,
    )
    from cxl_offload.ops.activations import offload_activations
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

_HOMES = {
    "memory": (
        "Bind",
        "Dax",
        "FirstTouch",
        "Interleave",
        "Session",
        "Placement",
        "Preferred",
        "Weighted",
        "use",
    ),
    "ops.activations": ("offload_activations",),
    "ops.offload": ("offload_optimizer",),
    "tensor": (
        "empty",
        "empty_like",
        "from_tensor",
        "full",
        "move",
        "placement_of",
        "record_stream",
        "stats",
        "zeros",
    ),
    "topology": ("discover", "load_machine"),
}

__all__ = [
    "Bind",
    "Dax",
    "FirstTouch",
    "Interleave",
    "Placement",
    "Preferred",
    "Session",
    "Weighted",
    "discover",
    "empty",
    "empty_like",
    "from_tensor",
    "full",
    "load_machine",
    "move",
    "offload_activations",
    "offload_optimizer",
    "placement_of",
    "record_stream",
    "stats",
    "use",
    "zeros",
]

remember_gone_modules()
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
