"""Threads of the CPUs by the node that they read, for plans in which CPUs compute."""

from __future__ import annotations

from collections.abc import Sequence

from cxl_offload.plan.equations.threads import ThreadedTier, threads_for_bytes
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.plan.machine_rates import core_bytes_per_s
from cxl_offload.topology import Machine


def saturation_of(machine: Machine, node: HostNode, core: int) -> int | None:
    """Threads on the CPUs of ``core`` that saturate reads of a node, from a profile or the
    machine's file; None: not known."""
    access = machine.access(core, node.node)
    return None if access is None else access.read_saturation_threads


def threads_by_node(
    machine: Machine, hardware: Hardware, read: Sequence[float]
) -> tuple[dict[int, int], list[str]]:
    """The cores that compute as threads of the nodes that they read, and what was assumed.

    The cores of each of several sockets read what is near them.

    Parameters
    ----------
    read
        Bytes that CPUs read on every node of the hardware in one decode step.
    """
    if not hardware.cores or not any(read):
        return {}, []
    found: dict[int, int] = {}
    assumed: list[str] = []
    every = range(len(hardware.nodes))
    if not hardware.sockets:
        _add(found, assumed, (machine, hardware, read), (machine.initiator, hardware.cores), every)
    for socket in hardware.sockets:
        far = {node for crossing in socket.crossings for node in crossing.rates}
        near = [at for at in every if hardware.nodes[at].node not in far]
        _add(found, assumed, (machine, hardware, read), (socket.node, socket.cores), near)
    if len(found) < 2 or not assumed:
        return found, []
    rate = f"{core_bytes_per_s(machine) / 1e9:.4g} GB/s a thread assumed on {', '.join(assumed)}"
    return found, [f"threads of the nodes: {rate}; cxl-offload profile measures it"]


def _add(
    found: dict[int, int],
    assumed: list[str],
    asked: tuple[Machine, Hardware, Sequence[float]],
    team: tuple[int, int],
    places: Sequence[int],
) -> None:
    """The threads of some cores on the nodes at these places; what is not read leaves them at
    home."""
    (machine, hardware, read), (core, cores) = asked, team
    nodes = [hardware.nodes[at] for at in places]
    nbytes = [read[at] for at in places]
    if not any(nbytes):
        found[core] = found.get(core, 0) + cores
        return
    known = [saturation_of(machine, node, core) for node in nodes]
    tiers = [
        ThreadedTier(
            node.name, _one_thread(node, count, core_bytes_per_s(machine)), node.read_bytes_per_s
        )
        for node, count in zip(nodes, known, strict=True)
    ]
    for node, count, saturation in zip(
        nodes, threads_for_bytes(tiers, nbytes, cores), known, strict=True
    ):
        if count:
            found[node.node] = found.get(node.node, 0) + count
            if saturation is None:
                assumed.append(node.where)


def _one_thread(node: HostNode, saturation: int | None, assumed: float) -> float:
    if saturation:
        return node.read_bytes_per_s / saturation
    return min(assumed, node.read_bytes_per_s)
