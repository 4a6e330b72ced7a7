"""The machine: nodes, links and limits, read from sysfs or from a machine file."""

from __future__ import annotations

from cxl_offload.topology.codec import machine_from_json, machine_to_json
from cxl_offload.topology.discovery import discover
from cxl_offload.topology.machine_file import load_machine, machine_names, parse_machine
from cxl_offload.topology.model import (
    TIER_NAMES,
    Access,
    BlockGroup,
    Citation,
    CxlEvidence,
    DaxDevice,
    DmaPath,
    Drive,
    Fact,
    Gpu,
    HugePagePool,
    Limits,
    Link,
    Machine,
    Node,
    NodeKind,
    Tier,
    Zone,
)
from cxl_offload.topology.tiers import seen_from

__all__ = [
    "TIER_NAMES",
    "Access",
    "BlockGroup",
    "Citation",
    "CxlEvidence",
    "DaxDevice",
    "DmaPath",
    "Drive",
    "Fact",
    "Gpu",
    "HugePagePool",
    "Limits",
    "Link",
    "Machine",
    "Node",
    "NodeKind",
    "Tier",
    "Zone",
    "discover",
    "load_machine",
    "machine_from_json",
    "machine_names",
    "machine_to_json",
    "parse_machine",
    "seen_from",
]
