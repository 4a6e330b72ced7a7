"""The kernel of a machine that is not here: page maps and capacities as a machine file has them."""

from __future__ import annotations

from cxl_offload import _C
from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.topology import DaxDevice, Machine, Node

_DAX_ALIGNMENT_BYTES = HUGE_PAGE_BYTES
"""Of a simulated device that names none; what the kernel's default is on x86."""


def simulated_kernel(
    machine: Machine, *, initiator: int | None, process_limit_bytes: int | None
) -> _C.SimulatedKernel:
    """See :meth:`cxl_offload.memory.Session.simulated`."""
    nodes = [node for node in machine.nodes if node.has_memory]
    rows = []
    for node in nodes:
        taken = 0 if node.free_bytes is None else node.capacity_bytes - node.free_bytes
        pools = [(pool.page_bytes, pool.total) for pool in node.huge_pages]
        rows.append((node.id, node.capacity_bytes, taken, pools))
    return _C.SimulatedKernel(
        rows,
        _distances(machine, [node.id for node in nodes]),
        initiator=machine.initiator if initiator is None else initiator,
        allowed_nodes=[node.id for node in nodes if node.allowed],
        process_limit_bytes=process_limit_bytes,
        movable_nodes=[node.id for node in nodes if _is_movable(node)],
        dax=[_dax_row(device) for device in machine.dax if device.size_bytes],
    )


def _distances(machine: Machine, nodes: list[int]) -> list[list[int]]:
    """The distance matrix over ``nodes``; empty, which means all alike, where any is missing."""
    try:
        return [[machine.distances[first][second] for second in nodes] for first in nodes]
    except KeyError:
        return []


def _is_movable(node: Node) -> bool:
    """Whether all memory of a node is in ZONE_MOVABLE; a partly movable node can keep pins."""
    zones = [zone for zone in node.zones if zone.managed_bytes]
    return bool(zones) and all(zone.name == "Movable" for zone in zones)


def _dax_row(device: DaxDevice) -> tuple[str, int, int, str, int]:
    align_bytes = device.align_bytes or _DAX_ALIGNMENT_BYTES
    usable = device.size_bytes // align_bytes * align_bytes
    target = -1 if device.target_node is None else device.target_node
    return device.name, usable, align_bytes, device.mode, target
