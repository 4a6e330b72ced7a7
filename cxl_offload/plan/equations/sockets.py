"""Memory that the cores of several sockets read at once, near them and across the links between.

Bytes are spread over nodes, and every node gives no more than its rate to all sockets together.
Where the threads of all sockets have equal parts of the work, each socket reads its part of the
bytes of every node, and what is not near it crosses a link. So torch's linear layers do; attention,
whose teams look where pages are for 64 parts of a call, is taken to do so too, as a part of a large
cache has many granules. Of copies each socket reads its own, and nothing crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """Memory near another socket.

    ``rates`` are the bytes/s that the cores of this one reach on each of its nodes alone,
    ``link_bytes_per_s`` on all of them together.
    """

    rates: Mapping[int, float]
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Socket:
    """The cores of one socket, the node that they are on, and what they cross to other sockets."""

    node: int
    cores: int
    crossings: tuple[Crossing, ...]


def core_shares(sockets: Sequence[Socket]) -> tuple[float, ...]:
    """The part of the work that each socket has, by its cores."""
    total = sum(socket.cores for socket in sockets)
    return tuple(socket.cores / total for socket in sockets)


def even_rates(nodes: Mapping[int, float], sockets: Sequence[Socket]) -> tuple[float, ...]:
    """Bytes/s of every node where each socket reads its part of the node's bytes.

    A socket with a share ``c`` of the cores, which reaches ``r`` there, lets ``r / c`` bytes a
    second be read; the node itself gives no more than its rate.

    Parameters
    ----------
    nodes
        Node to what it gives to all CPUs together.
    """
    found = dict(nodes)
    for share, socket in zip(core_shares(sockets), sockets, strict=True):
        for crossing in socket.crossings:
            for node, rate in crossing.rates.items():
                if node in found:
                    found[node] = min(found[node], rate / share)
    return tuple(found.values())


def link_costs(nodes: Sequence[int], sockets: Sequence[Socket]) -> list[dict[int, float]]:
    """For each link what a byte of each node occupies of it, in seconds, by the node's place.

    The same split of the work as in :func:`even_rates`. Links over which one node alone is read
    are left out: its rate bounds them.
    """
    found = []
    for share, socket in zip(core_shares(sockets), sockets, strict=True):
        for crossing in socket.crossings:
            costs = {
                at: share / crossing.link_bytes_per_s
                for at, node in enumerate(nodes)
                if node in crossing.rates
            }
            if len(costs) > 1:
                found.append(costs)
    return found
