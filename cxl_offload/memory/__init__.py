"""Host memory by policy: which NUMA nodes the pages of an allocation live on."""

from cxl_offload.memory.asked_pages import CheckedPages, StrayPages
from cxl_offload.memory.in_use import chosen_session, current_session, use
from cxl_offload.memory.lost import (
    Survival,
    lost_memory,
    survive_memory_errors,
    written_anew,
)
from cxl_offload.memory.placement import NOT_FAULTED_IN, Placement
from cxl_offload.memory.policy import (
    Bind,
    Dax,
    FirstTouch,
    Interleave,
    Policy,
    PolicyLike,
    Preferred,
    Replicate,
    Weighted,
    as_policy,
    known_policy,
    parse_policy,
)
from cxl_offload.memory.session import Allocation, Session
from cxl_offload.memory.shared import Leftover, find_leftovers
from cxl_offload.memory.shared_region import SharedRegion, remove_leftovers
from cxl_offload.memory.stats import Count, NodeUse, Stats
from cxl_offload.renamed import old_names
from cxl_offload.topology.node import Pages

__all__ = [
    "NOT_FAULTED_IN",
    "Allocation",
    "Bind",
    "CheckedPages",
    "Count",
    "Dax",
    "FirstTouch",
    "Interleave",
    "Leftover",
    "NodeUse",
    "Pages",
    "Placement",
    "Policy",
    "PolicyLike",
    "Preferred",
    "Replicate",
    "Session",
    "SharedRegion",
    "Stats",
    "StrayPages",
    "Survival",
    "Weighted",
    "as_policy",
    "chosen_session",
    "current_session",
    "find_leftovers",
    "known_policy",
    "lost_memory",
    "parse_policy",
    "remove_leftovers",
    "survive_memory_errors",
    "use",
    "written_anew",
]

__getattr__ = old_names(__name__)
