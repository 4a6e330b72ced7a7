"""What this machine's memory is, and what on it will hurt. Needs neither torch nor root."""

from __future__ import annotations

from cxl_offload import discover
from cxl_offload.topology.hazards import find_hazards
from cxl_offload.units import format_bytes


def main() -> None:
    machine = discover()
    print(f"{machine.name}: the CPUs of node {machine.initiator} see")
    for tier in machine.tiers:
        held = sum(machine.node(node).capacity_bytes for node in tier.nodes)
        nodes = ", ".join(map(str, tier.nodes))
        print(f"  tier {tier.name}: {format_bytes(held)} on node {nodes}")
    if not any(tier.name == "cxl" for tier in machine.tiers):
        print("  no CXL memory: the other examples simulate a server that has some")
    for hazard in find_hazards():
        print(f"{hazard.severity}: {hazard.found}\n  costs: {hazard.cost}\n  do: {hazard.remedy}")


if __name__ == "__main__":
    main()
