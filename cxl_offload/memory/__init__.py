"""Host memory by policy: which NUMA nodes the pages of an allocation live on."""

from cxl_offload.memory.in_use import active, chosen, use
from cxl_offload.memory.placement import NOT_FAULTED_IN, Placement
from cxl_offload.memory.policy import (
    Bind,
    Dax,
    FirstTouch,
    Interleave,
    PlacementLike,
    Policy,
    Preferred,
    Weighted,
    as_policy,
    parse_policy,
)
from cxl_offload.memory.session import Memory, Pages
from cxl_offload.memory.shared import Leftover, find_leftovers
from cxl_offload.memory.shared_region import SharedRegion, remove_leftovers
from cxl_offload.memory.stats import Count, NodeUse, Stats

__all__ = [
    "NOT_FAULTED_IN",
    "Bind",
    "Count",
    "Dax",
    "FirstTouch",
    "Interleave",
    "Leftover",
    "Memory",
    "NodeUse",
    "Pages",
    "Placement",
    "PlacementLike",
    "Policy",
    "Preferred",
    "SharedRegion",
    "Stats",
    "Weighted",
    "active",
    "as_policy",
    "chosen",
    "find_leftovers",
    "parse_policy",
    "remove_leftovers",
    "use",
]
