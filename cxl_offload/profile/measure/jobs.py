"""Which paths, sweeps and copies there are to measure; everything is checked before the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.profile.cpus import CpuOrder, order_cpus
from cxl_offload.profile.measure import probe
from cxl_offload.profile.measure.effort import Effort, WorkingSets, choose_sizes
from cxl_offload.profile.measure.findings import Job
from cxl_offload.profile.measure.gpu import CopyProbe, Gpus
from cxl_offload.profile.measure.path import PathProbe
from cxl_offload.profile.measure.probe import Allocator
from cxl_offload.profile.measure.sweep import SweepProbe, least_bytes
from cxl_offload.renamed import old_names
from cxl_offload.topology import Machine, Node


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What to measure; ``None`` is everything that the effort includes."""

    effort: Effort
    nodes: Sequence[int] | None = None
    initiators: Sequence[int] | None = None
    interleaves: Sequence[tuple[int, ...]] | None = None
    working_set_bytes: int | None = None


def choose_jobs(session: Allocator, request: MeasureRequest, gpus: Gpus, *, thp: str) -> list[Job]:
    """Paths, then sweeps, then copies.

    Raises
    ------
    ValueError
        A node cannot be measured, or there is too little memory.
    """
    targets = targets_of(session.machine, request.nodes)
    starts = _initiators(session.machine, request.initiators)
    sets = request.interleaves
    if sets is None:
        several = tuple(node.id for node in targets)
        sets = (several,) if request.effort.mode == "full" and len(several) > 1 else ()
    jobs: list[Job] = [
        PathProbe(
            session,
            initiator,
            node,
            order=order,
            sizes=_sizes(initiator, node, order, request),
            effort=request.effort,
            transparent_huge_pages=thp,
        )
        for initiator, order in starts.items()
        for node in targets
    ]
    for initiator, order in starts.items():
        jobs += [_sweep(session, initiator, order, nodes, request) for nodes in sets]
    if "copies" in request.effort.parts:
        cpus = next(iter(starts.values())).cpus
        jobs.append(CopyProbe(session, gpus, targets, cpus=cpus, effort=request.effort))
    return jobs


def _sizes(initiator: Node, node: Node, order: CpuOrder, request: MeasureRequest) -> WorkingSets:
    return choose_sizes(
        initiator,
        node,
        threads=len(order.cpus),
        effort=request.effort,
        asked_bytes=request.working_set_bytes,
    )


def _sweep(
    session: Allocator,
    initiator: Node,
    order: CpuOrder,
    nodes: Sequence[int],
    request: MeasureRequest,
) -> SweepProbe:
    if len(set(nodes)) < 2:
        raise ValueError(f"interleave over nodes {list(nodes)}: name two different ones")
    members = targets_of(session.machine, nodes)
    smallest = min(_sizes(initiator, node, order, request).traffic_bytes for node in members)
    return SweepProbe(
        session,
        initiator.id,
        tuple(node.id for node in members),
        order=order,
        nbytes=max(smallest, least_bytes(len(members))),
        effort=request.effort,
    )


def refuse_simulated(session: Allocator) -> None:
    if session.is_simulated or session.machine.simulated:
        raise ValueError(
            f"measure machine {session.machine.name!r}: it is simulated and its bytes are ordinary "
            "memory of this host; measure a real machine, or use the machine file's own numbers"
        )


def targets_of(machine: Machine, asked: Sequence[int] | None) -> tuple[Node, ...]:
    usable = machine.usable_nodes()
    if asked is None:
        if not usable:
            raise ValueError(f"machine {machine.name}: no node has memory that may be used")
        return usable
    if not asked:
        raise ValueError("measure the memory of no node: name at least one")
    everything = machine.usable_nodes(include_gpu_memory=True)
    for node in asked:
        if machine.node(node) not in everything:
            raise ValueError(
                f"measure the memory of node {node}: it is offline, empty or not allowed to this "
                f"process; usable are {', '.join(str(entry.id) for entry in usable) or 'none'}"
            )
    return tuple(machine.node(node) for node in dict.fromkeys(asked))


def _initiators(machine: Machine, asked: Sequence[int] | None) -> dict[Node, CpuOrder]:
    allowed = set(probe.allowed_cpus())
    found = {}
    wanted = [node.id for node in machine.nodes] if asked is None else dict.fromkeys(asked)
    for initiator in wanted:
        node = machine.node(initiator)
        cpus = allowed & set(node.cpus)
        if cpus:
            found[node] = order_cpus(cpus)
        elif asked is not None:
            raise ValueError(
                f"measure from node {initiator}: this process may use none of its "
                f"{len(node.cpus)} CPUs; choose a node with CPUs of this process's cpuset"
            )
    if not found:
        raise ValueError(f"machine {machine.name}: no node has CPUs that this process may use")
    return found


__getattr__ = old_names(__name__)
