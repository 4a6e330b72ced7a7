"""From a machine to its profile: which paths, in what time, with what words on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from cxl_offload.profile.cpus import CpuOrder, order_cpus
from cxl_offload.profile.fingerprint import read_fingerprint
from cxl_offload.profile.measure import probe
from cxl_offload.profile.measure.effort import FULL, QUICK, RATES, Effort, Sizes, choose_sizes
from cxl_offload.profile.measure.path import PathProbe
from cxl_offload.profile.measure.probe import Allocator
from cxl_offload.profile.measure.sweep import SweepProbe, least_bytes
from cxl_offload.profile.model import Fingerprint, InterleaveSweep, PathProfile, Profile
from cxl_offload.profile.schedule import Progress, Schedule
from cxl_offload.topology import Machine, Node

__all__ = ["FULL_SECONDS", "QUICK_SECONDS", "measure_machine", "quick"]

FULL_SECONDS = 110.0
"""For one path (the CPUs of one node and the memory of one node), and for each sweep."""

QUICK_SECONDS = 8.0

_log = logging.getLogger(__name__)


def measure_machine(
    memory: Allocator,
    *,
    mode: Effort = FULL,
    seconds_per_path: float | None = None,
    nodes: Sequence[int] | None = None,
    initiators: Sequence[int] | None = None,
    interleaves: Sequence[tuple[int, ...]] | None = None,
    working_set_bytes: int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure the memory of this machine.

    Nothing else should run meanwhile: other work shows up as lower medians and wider spreads.

    Parameters
    ----------
    memory
        Where buffers come from; its machine says which nodes there are. Its caches are trimmed
        afterwards.
    mode
        ``FULL`` or ``QUICK``: how many points, and over how much memory.
    seconds_per_path
        Bound for each path and each sweep; by default 110 s, and 8 s with ``QUICK``. What there
        is no time for is left out, and a note of the path says so.
    nodes, initiators
        Node ids whose memory, and from whose CPUs, to measure; by default all usable ones.
    interleaves
        Sets of two and more nodes to sweep weighted interleaves over, from every initiator; by
        default all measured nodes together, if there are two or more and the mode is ``FULL``.
    working_set_bytes
        In place of a multiple of the last-level cache: for memory that is very slow, or small.
    progress
        Called before every step.

    Raises
    ------
    ValueError
        The memory is simulated, a node cannot be measured, or there is too little of it.
    PlacementError
        Buffers are not where they should be.
    MemoryError, OSError
        From the allocator or the kernel.
    """
    _refuse_simulated(memory)
    budget = seconds_per_path
    if budget is None:
        budget = QUICK_SECONDS if mode is QUICK else FULL_SECONDS
    if not budget > 0:
        raise ValueError(f"measure for {budget} s: give a time above 0")
    targets = _targets(memory.machine, nodes)
    if interleaves is None:
        several = tuple(node.id for node in targets)
        interleaves = (several,) if mode is FULL and len(several) > 1 else ()
    for chosen in interleaves:
        if len(set(chosen)) < 2:
            raise ValueError(f"interleave over nodes {list(chosen)}: name two different ones")
    fingerprint = read_fingerprint(memory.machine, isa=probe.best_isa())
    starts = _initiators(memory.machine, initiators)
    jobs = _jobs(memory, starts, targets, interleaves, mode, working_set_bytes, fingerprint)
    return _run(memory, jobs, mode, budget, fingerprint, progress)


def quick(
    memory: Allocator,
    seconds: float = 4.0,
    *,
    nodes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Load and store bandwidth and idle latency of every node, from the machine's initiator.

    ``quick(memory).rates()`` gives one :class:`~cxl_offload.profile.NodeRates` a node.

    Parameters
    ----------
    memory
        As for :func:`measure_machine`.
    seconds
        The most, shared by the nodes; one node takes about two when the machine is idle. What
        there is no time for is left out, and notes say so.
    nodes, progress
        As for :func:`measure_machine`.

    Raises
    ------
    ValueError, PlacementError, MemoryError, OSError
        As :func:`measure_machine`.
    """
    _refuse_simulated(memory)
    count = len(_targets(memory.machine, nodes))
    return measure_machine(
        memory,
        mode=RATES,
        seconds_per_path=seconds / count,
        nodes=nodes,
        initiators=[memory.machine.initiator],
        progress=progress,
    )


def _refuse_simulated(memory: Allocator) -> None:
    if memory.is_simulated or memory.machine.simulated:
        raise ValueError(
            f"measure machine {memory.machine.name!r}: it is simulated and its bytes are ordinary "
            "memory of this host; measure a real machine, or use the machine file's own numbers"
        )


def _targets(machine: Machine, asked: Sequence[int] | None) -> tuple[Node, ...]:
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


def _jobs(
    memory: Allocator,
    initiators: dict[Node, CpuOrder],
    targets: tuple[Node, ...],
    interleaves: Sequence[tuple[int, ...]],
    mode: Effort,
    asked_bytes: int | None,
    fingerprint: Fingerprint,
) -> list[PathProbe | SweepProbe]:
    """Everything is checked here, before the first measurement."""

    def sizes(initiator: Node, node: Node, order: CpuOrder) -> Sizes:
        return choose_sizes(
            initiator, node, threads=len(order.cpus), effort=mode, asked_bytes=asked_bytes
        )

    jobs: list[PathProbe | SweepProbe] = [
        PathProbe(
            memory,
            initiator,
            node,
            order=order,
            sizes=sizes(initiator, node, order),
            effort=mode,
            transparent_huge_pages=fingerprint.transparent_huge_pages,
        )
        for initiator, order in initiators.items()
        for node in targets
    ]
    for initiator, order in initiators.items():
        for nodes in interleaves:
            members = _targets(memory.machine, nodes)
            smallest = min(sizes(initiator, node, order).traffic_bytes for node in members)
            jobs.append(
                SweepProbe(
                    memory,
                    initiator.id,
                    tuple(node.id for node in members),
                    order=order,
                    nbytes=max(smallest, least_bytes(len(members))),
                    effort=mode,
                )
            )
    return jobs


def _run(
    memory: Allocator,
    jobs: list[PathProbe | SweepProbe],
    mode: Effort,
    budget: float,
    fingerprint: Fingerprint,
    progress: Progress | None,
) -> Profile:
    began = time.monotonic()
    schedules = [Schedule(budget_s=budget, longest_s=mode.longest_s) for _ in jobs]
    for job, schedule in zip(jobs, schedules, strict=True):
        job.plan(schedule)
    total = sum(map(len, schedules))
    done = 0

    def tell(label: str) -> None:
        nonlocal done
        if progress is not None:
            progress(label, done, total)
        done += 1

    paths: list[PathProfile] = []
    sweeps: list[InterleaveSweep] = []
    notes: list[str] = []
    for job, schedule in zip(jobs, schedules, strict=True):
        try:
            skipped = schedule.run(tell)
        finally:
            job.close()
            memory.trim()
        if isinstance(job, PathProbe):
            paths.append(job.result(skipped))
        else:
            sweep = job.result()
            sweeps += [] if sweep is None else [sweep]
            notes += [f"not measured, the time was over: {label}" for label in skipped]
            notes += [note for note in [job.quality.note()] if note is not None]
    if progress is not None:
        progress("done", total, total)
    seconds = time.monotonic() - began
    _log.info("measured %d paths and %d sweeps in %.1f s", len(paths), len(sweeps), seconds)
    return Profile(
        machine=fingerprint,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        measured=True,
        mode=mode.mode,
        seconds=round(seconds, 3),
        paths=tuple(paths),
        sweeps=tuple(sweeps),
        notes=tuple(notes),
    )
