"""Which threads a kernel runs on: teams that stay alive, bound near the nodes they read.

More threads than a node's memory can feed only take bandwidth from each other, so each tier gets
about as many as saturate it: Wang et al., *Performance Characterization of CXL Memory and Its Use
Cases*, section III. :func:`team_for` takes such shares; where each tier saturates comes from a
measured profile (``cxl-offload profile``).
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Iterator, Mapping

from cxl_offload import _C
from cxl_offload.topology import Machine, discover

Team = _C.WorkerTeam

CountsByNode = int | Mapping[int, int] | None
Threads = CountsByNode | Team
"""A number of threads, threads a node (``{0: 23, 1: 23, 2: 6}``), or None: all allowed CPUs.

Or what :func:`team_for` returned before, for callers that call often: finding the team again takes
as long as a small kernel.
"""

ThreadGroup = tuple[int, int, tuple[int, ...]]
"""Node (-1: any), threads, CPUs that they are bound to (none: not bound)."""

_ANY_NODE = -1


def _cpus_by_node(machine: Machine, allowed: frozenset[int]) -> dict[int, tuple[int, ...]]:
    found = {node.id: tuple(sorted(allowed & set(node.cpus))) for node in machine.nodes}
    return {node: cpus for node, cpus in found.items() if cpus}


def _nearest(machine: Machine, node: int, candidates: Mapping[int, tuple[int, ...]]) -> int:
    """The node itself when it has CPUs, else the one with CPUs from which it is nearest."""
    if node in candidates:
        return node
    far = float("inf")
    return min(candidates, key=lambda near: machine.distances.get(near, {}).get(node, far))


def _spread(threads: int, cpus_by_node: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """Spreads threads over the nodes: one CPU after another while there are any."""
    nodes = sorted(cpus_by_node)
    shares = dict.fromkeys(nodes, 0)
    for _ in range(threads):
        chosen = min(nodes, key=lambda node: shares[node] / len(cpus_by_node[node]))
        shares[chosen] += 1
    return {node: count for node, count in shares.items() if count > 0}


def groups_for(
    threads: CountsByNode, machine: Machine, allowed: frozenset[int]
) -> tuple[ThreadGroup, ...]:
    """The groups of threads that :func:`team_for` makes a team of.

    Parameters
    ----------
    threads
        As in :data:`Threads`, but no team. A node without CPUs is read by threads on the nearest
        node that has some.
    machine
        The machine that the threads run on.
    allowed
        CPUs that the process may use.

    Raises
    ------
    ValueError
        No thread, or a node that the machine does not have.
    """
    if isinstance(threads, Mapping):
        bad = {node: count for node, count in threads.items() if count < 1}
        if bad or not threads:
            raise ValueError(f"threads {dict(threads)}: give at least one thread a node named")
    elif threads is not None and threads < 1:
        raise ValueError(f"threads {threads}: give at least one, or None for all allowed CPUs")
    cpus = _cpus_by_node(machine, allowed)
    if isinstance(threads, Mapping):
        for node in threads:
            machine.node(node)
        if not cpus:
            raise ValueError(f"threads {dict(threads)}: no node is known to have CPUs here")
        return tuple(
            (node, count, cpus[_nearest(machine, node, cpus)])
            for node, count in sorted(threads.items())
        )
    count = len(allowed) if threads is None else threads
    if len(cpus) < 2:
        return ((_ANY_NODE, count, ()),)
    return tuple((node, share, cpus[node]) for node, share in _spread(count, cpus).items())


def check_threads(threads: object) -> None:
    """Refuses what is no choice of threads, before one of Python's own messages does.

    Raises
    ------
    TypeError
        No number, no numbers by node, no team and not None.
    """
    counts: list[object] = [threads]
    if isinstance(threads, Mapping):
        counts = [*threads.keys(), *threads.values()]
    elif threads is None or isinstance(threads, Team):
        return
    if not all(isinstance(count, numbers.Integral) for count in counts):
        raise TypeError(
            f"threads is {' '.join(repr(threads).split())[:80]}; it must be a number of threads, "
            "threads by node, such as {0: 23, 2: 6}, or None for all allowed CPUs"
        )


@functools.lru_cache(maxsize=8)
def _team(key: int | tuple[tuple[int, int], ...] | None, cpus: frozenset[int]) -> _C.WorkerTeam:
    threads = dict(key) if isinstance(key, tuple) else key
    return _C.WorkerTeam(groups_for(threads, discover(), cpus))


_by_default: dict[str, CountsByNode] = {"threads": None}


@contextlib.contextmanager
def threads_by_default(threads: CountsByNode) -> Iterator[None]:
    """What ``None`` stands for while the block lasts, in all threads of the process.

    For frameworks whose calls of a kernel nobody can give a number of threads.
    """
    before = _by_default["threads"]
    _by_default["threads"] = threads
    try:
        yield
    finally:
        _by_default["threads"] = before


def team_for(threads: Threads) -> _C.WorkerTeam:
    """The team for this choice, the same one for every caller that chooses alike.

    Raises
    ------
    TypeError, ValueError
        As :func:`check_threads` and :func:`groups_for`.
    """
    if isinstance(threads, Team):
        return threads
    if threads is not None and type(threads) is not int:
        check_threads(threads)
    if threads is None:
        threads = _by_default["threads"]
    if threads is None or isinstance(threads, int):  # asked first: a Mapping takes longer
        return _team(threads, frozenset(_C.allowed_cpus()))
    return _team(tuple(sorted(threads.items())), frozenset(_C.allowed_cpus()))


@functools.lru_cache(maxsize=1)
def _kernel() -> _C.Kernel:
    return _C.linux_kernel()


def kernel_for(team: _C.WorkerTeam) -> _C.Kernel | None:
    """Whom a team of several groups asks where pages are; None for a team that need not know."""
    return _kernel() if len(team.groups) > 1 else None
