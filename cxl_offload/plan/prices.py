"""What one more GiB or GB/s of everything would bring: each is planned again with it."""

from __future__ import annotations

from collections.abc import Iterator
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


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that hardware could have more of, and the hardware with one ``unit`` more."""

    what: str
    unit: str
    more: Hardware


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
                yield Resource(f"{node.name} {label}", unit, more)
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
    """Gains in tokens/s, never below 0."""
    made = []
    for each in resources(found.hardware, computes_on_cpu=executor.computes_on_cpu):
        again = executor.search(each.more, like=found)
        rate = found.tokens_per_s if again is None else again.tokens_per_s
        gain = rate - found.tokens_per_s
        gain = gain if gain > _ROUNDING * rate else 0.0
        made.append(PriceEstimate(what=each.what, unit=each.unit, gain_tokens_per_s=gain))
    return tuple(made)
