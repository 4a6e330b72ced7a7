"""Who of several processes on one machine may hold how much of every node.

What a process asks for is set aside first; the rest of every kind of memory (DRAM, CXL, HBM) is
divided equally, so that each process has its share of the kind, on the nodes nearest to it. Both
are flows of whole pages from claims to nodes, of least distance; nothing is rounded away.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.renamed import old_names
from cxl_offload.topology import Machine, NodeKind
from cxl_offload.topology.model import NO_PATH_DISTANCE
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """Bytes that a process must get, on any of these nodes; ``what`` is how it named them."""

    what: str
    nodes: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the machine.

    Attributes
    ----------
    rank
        In the whole job.
    gpu
        Name of its GPU in the machine, None where it has none or any will do.
    home
        The node whose CPUs it runs on; None leaves the choice to :func:`assign_homes`.
    nodes
        Those that it may use at all; None means every one.
    requests
        What it must get.
    """

    rank: int
    gpu: str | None = None
    home: int | None = None
    nodes: frozenset[int] | None = None
    requests: tuple[NodeRequest, ...] = ()


def assign_homes(machine: Machine, members: Sequence[Member]) -> list[Member]:
    """The members with a GPU, where the machine has any, and a home near it.

    GPUs that nobody named are given out in order; without GPUs, members that named no home are
    spread over the nodes with CPUs, neighbours in rank together.
    """
    taken = {member.gpu for member in members}
    spare = [gpu.name for gpu in machine.gpus if gpu.name not in taken]
    names = spare or [gpu.name for gpu in machine.gpus]
    with_cpus = [node.id for node in machine.nodes if node.cpus and node.online]
    placed = []
    unnamed = 0
    for index, member in enumerate(members):
        gpu = member.gpu
        if gpu is None and names:
            gpu = names[unnamed % len(names)]
            unnamed += 1
        home = member.home
        near = None if gpu is None else machine.gpu(gpu).node
        if near is not None:
            home = near
        elif home is None:
            home = with_cpus[index * len(with_cpus) // len(members)]
        placed.append(replace(member, gpu=gpu, home=home))
    return placed


def divide_nodes(
    machine: Machine, capacities: Mapping[int, int], members: Sequence[Member]
) -> list[dict[int, int]]:
    """Node id to bytes for each member.

    Over all members they sum exactly to the capacities, except for memory of GPUs that are not
    theirs, and less than a page of nodes that are smaller.

    Parameters
    ----------
    machine
        With the distances and the owners of GPU memory.
    capacities
        Node id to the bytes that all members together may hold.
    members
        With homes, from :func:`assign_homes`.

    Raises
    ------
    ValueError
        The requests do not fit together; the message names each of them and the nodes.
    """
    room = {node: capacity // BASE_PAGE_BYTES for node, capacity in capacities.items()}
    shares = [dict.fromkeys(capacities, 0) for _ in members]
    asked = [
        (index, request) for index, member in enumerate(members) for request in member.requests
    ]
    claims = [
        _Claim(
            index,
            -(-request.nbytes // BASE_PAGE_BYTES),
            _costs(machine, members[index], [node for node in request.nodes if node in room]),
        )
        for index, request in asked
    ]
    if not _settle(claims, room, shares):
        raise ValueError(_do_not_fit(asked, members, capacities))
    for nodes, owners in _classes(machine, capacities, members):
        _divide_rest(machine, nodes, {index: members[index] for index in owners}, room, shares)
    for node, capacity in capacities.items():
        _add_odd_bytes(shares, node, capacity % BASE_PAGE_BYTES)
    return shares


@dataclass(frozen=True, slots=True)
class _Claim:
    """Pages for one member, and the distance of every node that can serve them."""

    member: int
    pages: int
    costs: dict[int, int]


def _costs(machine: Machine, member: Member, nodes: Iterable[int]) -> dict[int, int]:
    assert member.home is not None
    usable = [node for node in nodes if member.nodes is None or node in member.nodes]
    return {node: machine.distance(member.home, node) or NO_PATH_DISTANCE for node in usable}


def _classes(
    machine: Machine, nodes: Iterable[int], members: Sequence[Member]
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Nodes of one kind that the same members may use, and those members: divided together.

    GPU memory is open to the members on that GPU only.
    """
    classes: dict[tuple[NodeKind, tuple[int, ...]], list[int]] = {}
    for node in nodes:
        kind = machine.node(node).kind
        owners = tuple(
            index
            for index, member in enumerate(members)
            if (member.nodes is None or node in member.nodes)
            and (kind is not NodeKind.GPU or _owns(machine, member, node))
        )
        if owners:
            classes.setdefault((kind, owners), []).append(node)
    return [(found, owners) for (_, owners), found in classes.items()]


def _divide_rest(
    machine: Machine,
    nodes: Sequence[int],
    owners: Mapping[int, Member],
    room: dict[int, int],
    shares: list[dict[int, int]],
) -> None:
    """Equal parts for the owners; those of one home have the same nodes, too."""
    alike: dict[int | None, list[int]] = {}
    for index, member in owners.items():
        alike.setdefault(member.home, []).append(index)
    total = sum(room[node] for node in nodes)
    ends = [total * done // len(owners) for done in itertools.accumulate(map(len, alike.values()))]
    claims = [
        _Claim(group, end - start, _costs(machine, owners[found[0]], nodes))
        for group, (found, start, end) in enumerate(
            zip(alike.values(), [0, *ends], ends, strict=False)
        )
    ]
    parts = [dict.fromkeys(nodes, 0) for _ in claims]
    _settle(claims, room, parts)
    for found, part in zip(alike.values(), parts, strict=True):
        done = 0  # odd pages of one node and of the next go to different members
        for node, pages in part.items():
            for at in range(done, done + len(found)):
                share = pages // len(found) + (at - done < pages % len(found))
                shares[found[at % len(found)]][node] += share
            done += pages % len(found)


def _owns(machine: Machine, member: Member, node: int) -> bool:
    return member.gpu is not None and machine.gpu(member.gpu).memory_node == node


def _add_odd_bytes(shares: list[dict[int, int]], node: int, odd: int) -> None:
    """Pages to bytes; what is less than a page goes to the first that has any of the node."""
    for share in shares:
        share[node] *= BASE_PAGE_BYTES
    first = next((share for share in shares if share[node]), None)
    if first is not None:
        first[node] += odd


def _settle(claims: Sequence[_Claim], room: dict[int, int], shares: list[dict[int, int]]) -> bool:
    """Serves the claims at the least sum of distances, or nothing where they do not all fit.

    Takes from ``room`` and adds to ``shares``. Augments along cheapest paths, from claims through
    nodes and back where another claim can take a dearer node (successive shortest paths).
    """
    given = [dict.fromkeys(claim.costs, 0) for claim in claims]
    left = dict(room)
    for number, claim in enumerate(claims):
        missing = claim.pages
        while missing:
            path = _cheapest(number, claims, given, left)
            if path is None:
                return False
            moved = min(missing, left[path[-1][1]], *_taken(path, given))
            for at, (taker, node) in enumerate(path):
                given[taker][node] += moved
                if at + 1 < len(path):
                    given[path[at + 1][0]][node] -= moved
            left[path[-1][1]] -= moved
            missing -= moved
    room.update(left)
    for claim, nodes in zip(claims, given, strict=True):
        for node, pages in nodes.items():
            shares[claim.member][node] += pages
    return True


def _taken(path: list[tuple[int, int]], given: list[dict[int, int]]) -> list[int]:
    """Pages of each node on the way that its next taker can give up."""
    return [given[following[0]][node] for (_, node), following in itertools.pairwise(path)]


def _cheapest(
    start: int, claims: Sequence[_Claim], given: list[dict[int, int]], left: Mapping[int, int]
) -> list[tuple[int, int]] | None:
    """(claim, node it takes) from ``start`` to a node with room, of least added distance."""
    best: dict[int, int] = {start: 0}  # claim to the distance added until it needs another node
    came: dict[int, tuple[int, int]] = {}
    end: tuple[int, int, int] | None = None
    waiting = deque([start])
    while waiting:
        taker = waiting.popleft()
        for node, cost in claims[taker].costs.items():
            added = best[taker] + cost
            if left[node] and (end is None or added < end[0]):
                end = (added, taker, node)
            for other, nodes in enumerate(given):
                if other == taker or not nodes.get(node):
                    continue
                through = added - claims[other].costs[node]
                if through < best.get(other, through + 1):
                    best[other] = through
                    came[other] = (taker, node)
                    waiting.append(other)
    if end is None:
        return None
    path = [(end[1], end[2])]
    while path[0][0] != start:
        path.insert(0, came[path[0][0]])
    return path


def _do_not_fit(
    asked: Sequence[tuple[int, NodeRequest]],
    members: Sequence[Member],
    capacities: Mapping[int, int],
) -> str:
    wishes = ", ".join(
        f"rank {members[index].rank} {format_bytes(request.nbytes)} of {request.what}"
        for index, request in asked
    )
    nodes = ", ".join(f"{node}: {format_bytes(capacity)}" for node, capacity in capacities.items())
    return (
        f"requests do not fit on one machine together: {wishes}; its nodes hold {nodes}; "
        "ask for less, name more nodes or start fewer processes there"
    )


__getattr__ = old_names(__name__)
