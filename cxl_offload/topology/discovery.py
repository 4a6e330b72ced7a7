"""The machine this process runs on, or a captured tree of another one."""

from __future__ import annotations

import os

from cxl_offload.errors import ConfigError
from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.topology.cxl import classify_nodes, read_dax
from cxl_offload.topology.gpu import mark_gpu_memory, read_gpus
from cxl_offload.topology.limits import read_limits
from cxl_offload.topology.model import Limits, Machine
from cxl_offload.topology.node import Node, NodeKind
from cxl_offload.topology.sysfs import read_accesses, read_distances, read_nodes
from cxl_offload.topology.tiers import assign_tiers, choose_initiator
from cxl_offload.topology.tree import Tree
from cxl_offload.units import format_bytes


def discover(root: str | os.PathLike[str] = "/") -> Machine:
    """Read nodes, links, GPUs and limits below ``root``; nothing is written and no GPU is woken.

    Parameters
    ----------
    root
        ``"/"``, or a folder with a captured ``sys`` and ``proc``.

    Returns
    -------
    Machine
        What could not be read, or needs attention, is in its ``notes``.

    Raises
    ------
    ConfigError
        If there is no ``sys`` or ``proc`` below ``root``.
    """
    tree = Tree(root)
    if not tree.exists("/sys") and not tree.exists("/proc"):
        raise ConfigError(
            f"{os.fspath(root)} has neither sys nor proc: not a Linux system or a capture of one"
        )
    limits = read_limits(tree)
    nodes = read_nodes(tree, mems_allowed=limits.mems_allowed)
    distances = read_distances(tree, nodes)
    accesses = read_accesses(tree, nodes)
    dax = read_dax(tree)
    gpus = read_gpus(tree, nodes)
    nodes = mark_gpu_memory(tree, nodes, gpus)
    nodes = classify_nodes(tree, nodes, dax=dax, distances=distances, accesses=accesses)
    _note_limits(tree, nodes, limits)
    initiator = choose_initiator(nodes, limits)
    return Machine(
        name=tree.text("/proc/sys/kernel/hostname") or "unnamed",
        nodes=nodes,
        distances=distances,
        accesses=accesses,
        gpus=gpus,
        tiers=assign_tiers(nodes, distances, accesses, initiator),
        dax=dax,
        limits=limits,
        initiator=initiator,
        source="sysfs" if tree.live else "captured sysfs tree",
        notes=tuple(tree.notes),
    )


def _note_limits(tree: Tree, nodes: tuple[Node, ...], limits: Limits) -> None:
    hidden = [node.id for node in nodes if node.has_memory and not node.allowed]
    if hidden:
        tree.note(
            f"node {format_cpulist(hidden)} has memory that this process's cpuset forbids; "
            "start it with those nodes in cpuset.mems (docker run --cpuset-mems) to use them"
        )
    usable = sum(node.capacity_bytes for node in nodes if node.allowed)
    if limits.cgroup_max_bytes is not None and limits.cgroup_max_bytes < usable:
        tree.note(
            f"the cgroup allows {format_bytes(limits.cgroup_max_bytes)} of "
            f"{format_bytes(usable)}: more than that is killed, whatever the nodes have free"
        )
    for node in nodes:
        if node.movable_bytes and node.kind is NodeKind.CXL:
            tree.note(
                f"node {node.id}: {format_bytes(node.movable_bytes)} is in ZONE_MOVABLE; pinning "
                "for GPU copies moves pages to another node; online it with online_kernel, or "
                "use it as Device-DAX"
            )
