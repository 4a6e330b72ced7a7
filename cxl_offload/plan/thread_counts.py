"""Threads of the CPUs by the node that they read, for plans in which CPUs compute."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.equations.threads import ThreadedTier, threads_for_bytes
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.plan.machine_rates import ASSUMED_BYTES_PER_S_A_CORE
from cxl_offload.topology import Machine


def saturation_of(machine: Machine, node: HostNode) -> int | None:
    """Threads that saturate reads of a node, from a profile or its file; None: not known."""
    access = machine.access(machine.initiator, node.node)
    return None if access is None else access.read_saturation_threads


def threads_by_node(
    machine: Machine, hardware: Hardware, read: Sequence[float]
) -> tuple[dict[int, int], list[str]]:
    """The cores of the initiator as threads of the nodes that they read, and what was assumed.

    Parameters
    ----------
    read
        Bytes that CPUs read on every node of the hardware in one decode step.
    """
    cores = hardware.cores
    if not cores or not any(read):
        return {}, []
    known = [saturation_of(machine, node) for node in hardware.nodes]
    tiers = [
        ThreadedTier(node.name, _one_thread(node, count), node.read_bytes_per_s)
        for node, count in zip(hardware.nodes, known, strict=True)
    ]
    counts = threads_for_bytes(tiers, read, cores)
    found = {node.node: count for node, count in zip(hardware.nodes, counts, strict=True) if count}
    assumed = [
        node.where
        for node, count, saturation in zip(hardware.nodes, counts, known, strict=True)
        if count and saturation is None
    ]
    if len(found) < 2 or not assumed:
        return found, []
    rate = f"{ASSUMED_BYTES_PER_S_A_CORE / 1e9:.4g} GB/s a thread assumed on {', '.join(assumed)}"
    return found, [f"threads of the nodes: {rate}; cxl-offload profile measures it"]


def _one_thread(node: HostNode, saturation: int | None) -> float:
    if saturation:
        return node.read_bytes_per_s / saturation
    return min(ASSUMED_BYTES_PER_S_A_CORE, node.read_bytes_per_s)
