"""The most that a session may hold: by tier or node, as ``--limit`` of the command line says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from cxl_offload.memory.policy import DAX_NAME
from cxl_offload.topology import Machine
from cxl_offload.units import whole_bytes

Size: TypeAlias = int | str
RoomLimits: TypeAlias = Mapping[int, Size] | Mapping[str, Size] | Mapping[int | str, Size]
"""Node id, name of a tier or of a Device-DAX device, to bytes or a text such as ``"4GiB"``."""


def checked_limits(machine: Machine, limits: RoomLimits) -> tuple[dict[int, int], dict[str, int]]:
    """Bytes by node id, and by name of a Device-DAX device.

    Raises
    ------
    ValueError
        The machine has no such node or tier; a tier has several nodes, which a session counts one
        by one; two limits are for one node; or a size is none.
    """
    nodes: dict[int, int] = {}
    devices: dict[str, int] = {}
    for name, size in limits.items():
        most = _bytes_of(name, size)
        if isinstance(name, str) and DAX_NAME.fullmatch(name):
            devices[name] = most
            continue
        node = machine.node(name).id if isinstance(name, int) else _only_node(machine, name)
        if node in nodes:
            raise ValueError(f"limit of {name}: node {node} has a limit already; give one of them")
        nodes[node] = most
    return nodes, devices


def _bytes_of(name: int | str, size: Size) -> int:
    try:
        return whole_bytes(size)
    except ValueError as error:
        raise ValueError(f"limit of {name}: {error}") from None


def _only_node(machine: Machine, name: str) -> int:
    nodes = machine.tier(name).nodes
    if len(nodes) != 1:
        said = ", ".join(map(str, nodes)) or "none"
        raise ValueError(
            f"limit of {name}: its nodes are {said}, and a session counts each node; limit nodes "
            "by their numbers"
        )
    return nodes[0]
