"""What one more GiB or GB/s of everything would bring: each is planned again with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cxl_offload.plan.equations.sockets import Crossing, Socket
from cxl_offload.plan.executor import Candidate, Executor
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.plan_file import PriceEstimate
from cxl_offload.units import GB, GIB

T = TypeVar("T")

_ROUNDING = 1e-12
"""Share of a rate by which sums in another order may differ."""

_FEW = 2
"""Nodes that are asked for one by one at once: all of them together are one search more."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that hardware could have more of, and the hardware with one ``unit`` more.

    ``of_nodes`` names what of a node there is more of; empty: the resource is not a node's.
    """

    what: str
    unit: str
    more: Hardware
    of_nodes: str = ""


def _more_of_node(hardware: Hardware, at: int, field: str, unit: float) -> Hardware:
    nodes = list(hardware.nodes)
    nodes[at] = replace(nodes[at], **{field: getattr(nodes[at], field) + unit})
    return replace(hardware, nodes=tuple(nodes))


def resources(hardware: Hardware, *, computes_on_cpu: bool = True) -> Iterator[Resource]:
    """Every room and every known rate; what CPUs read counts only where they compute."""
    for at, node in enumerate(hardware.nodes):
        fields = [("usable_bytes", "capacity", "GiB", float(GIB))]
        if computes_on_cpu:
            fields.append(("read_bytes_per_s", "bandwidth (CPU)", "GB/s", float(GB)))
        if hardware.has_gpu:
            fields.append(("copy_bytes_per_s", "bandwidth (GPU copies)", "GB/s", float(GB)))
        for field, label, unit, size in fields:
            if getattr(node, field) != float("inf"):
                more = _more_of_node(hardware, at, field, size)
                yield Resource(f"{node.name} {label}", unit, more, field)
    if hardware.has_gpu:
        yield from _of_gpu(hardware)
    if hardware.sockets and computes_on_cpu:
        more = replace(hardware, sockets=tuple(map(_more_across, hardware.sockets)))
        yield Resource("links between sockets", "GB/s", more)
    if hardware.drive_usable_bytes:
        room = hardware.drive_usable_bytes + GIB
        yield Resource("nvme capacity", "GiB", replace(hardware, drive_usable_bytes=room))
        read = hardware.drive_read_bytes_per_s + GB
        yield Resource("nvme reads", "GB/s", replace(hardware, drive_read_bytes_per_s=read))


def _more_across(socket: Socket) -> Socket:
    """A socket that reads more of the others' memory."""
    crossings = (
        Crossing(
            {node: rate + GB for node, rate in crossing.rates.items()},
            crossing.link_bytes_per_s + GB,
        )
        for crossing in socket.crossings
    )
    return replace(socket, crossings=tuple(crossings))


def _of_gpu(hardware: Hardware) -> Iterator[Resource]:
    gpu = replace(
        hardware,
        gpu_usable_bytes=hardware.gpu_usable_bytes + GIB,
        gpu_memory_bytes=hardware.gpu_memory_bytes + GIB,
    )
    yield Resource("GPU memory", "GiB", gpu)
    link = replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s + GB)
    yield Resource("link", "GB/s", link)


def prices(executor: Executor[T], found: Candidate[T]) -> tuple[PriceEstimate, ...]:
    """Gains in tokens/s, never below 0.

    Where more on all nodes together brings nothing, more on one of them does not either: of many
    nodes most are asked for at once.
    """
    every = list(resources(found.hardware, computes_on_cpu=executor.computes_on_cpu))
    fields = defaultdict[str, list[Resource]](list)
    for each in every:
        if each.of_nodes:
            fields[each.of_nodes].append(each)
    useless = {
        name
        for name, of_nodes in fields.items()
        if len(of_nodes) > _FEW
        and not _gain(executor, found, _more_of_all(found.hardware, of_nodes))
    }
    made = []
    for each in every:
        gain = 0.0 if each.of_nodes in useless else _gain(executor, found, each.more)
        made.append(PriceEstimate(what=each.what, unit=each.unit, gain_tokens_per_s=gain))
    return tuple(made)


def _more_of_all(hardware: Hardware, resources: Sequence[Resource]) -> Hardware:
    """With more of several nodes together."""
    nodes = list(hardware.nodes)
    for each in resources:
        for at, (node, more) in enumerate(zip(hardware.nodes, each.more.nodes, strict=True)):
            if more != node:
                nodes[at] = more
    return replace(hardware, nodes=tuple(nodes))


def _gain(executor: Executor[T], found: Candidate[T], more: Hardware) -> float:
    """Tokens/s that better hardware brings."""
    again = executor.search(more, like=found)
    rate = found.tokens_per_s if again is None else again.tokens_per_s
    gain = rate - found.tokens_per_s
    return gain if gain > _ROUNDING * rate else 0.0
