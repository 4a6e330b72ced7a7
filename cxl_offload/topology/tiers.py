"""Names for classes of nodes, as seen from the CPUs of one node."""

from __future__ import annotations

from dataclasses import replace

from cxl_offload.topology.links import Access
from cxl_offload.topology.model import NO_PATH_DISTANCE, TIER_NAMES, Limits, Machine, Tier
from cxl_offload.topology.node import Node, NodeKind


def choose_initiator(nodes: tuple[Node, ...], limits: Limits) -> int:
    """The node whose CPUs this process runs on: the first allowed one, with memory if possible."""

    def rank(node: Node) -> tuple[bool, bool, bool, int]:
        runs_here = limits.cpus_allowed is None or bool(set(node.cpus) & set(limits.cpus_allowed))
        return (not node.cpus, not runs_here, not (node.has_memory and node.allowed), node.id)

    return min(nodes, key=rank).id


def assign_tiers(
    nodes: tuple[Node, ...],
    distances: dict[int, dict[int, int]],
    accesses: tuple[Access, ...],
    initiator: int,
) -> tuple[Tier, ...]:
    """Tiers of the nodes that may be used, nearest first in each.

    ``ldram`` is DRAM of the initiator's own socket (with sub-NUMA clustering, its own domain
    first), ``rdram`` that of other sockets. GPU memory is in ``hbm``, which nothing uses unasked.
    Nodes of unknown kind are in no tier.
    """
    own = next(node for node in nodes if node.id == initiator)
    latency = {a.target: a.read_latency_ns for a in accesses if a.initiator == initiator}

    def nearness(node: Node) -> tuple[int, float, int]:
        distance = distances.get(initiator, {}).get(node.id, NO_PATH_DISTANCE)
        return (distance, latency.get(node.id) or float("inf"), node.id)

    members: dict[str, list[Node]] = {name: [] for name in TIER_NAMES}
    for node in nodes:
        name = _tier_name(node, own)
        if name is not None and node.has_memory and node.allowed:
            members[name].append(node)
    return tuple(
        Tier(name, tuple(node.id for node in sorted(found, key=nearness)))
        for name, found in members.items()
        if found
    )


def _tier_name(node: Node, own: Node) -> str | None:
    if node.kind is NodeKind.DRAM:
        same_socket = own.socket is not None and node.socket == own.socket
        return "ldram" if node.id == own.id or same_socket else "rdram"
    if node.kind is NodeKind.CXL:
        return "cxl"
    return "hbm" if node.kind in (NodeKind.HBM, NodeKind.GPU) else None


def seen_from(machine: Machine, initiator: int) -> Machine:
    """The same machine with tiers named from the CPUs of another node.

    Raises
    ------
    ValueError
        If the machine has no such node, or it has no CPUs.
    """
    if not machine.node(initiator).cpus:
        raise ValueError(f"machine {machine.name}: node {initiator} has no CPUs to look from")
    tiers = assign_tiers(machine.nodes, machine.distances, machine.accesses, initiator)
    without_nodes = tuple(tier for tier in machine.tiers if not tier.nodes)
    return replace(machine, initiator=initiator, tiers=(*tiers, *without_nodes))
