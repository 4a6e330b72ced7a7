"""A machine with the numbers that were planned with, so that a replay asks for no others."""

from __future__ import annotations

from dataclasses import replace

from cxl_offload.plan.gpu import MEMORY_SHARE
from cxl_offload.plan.gpu_kinds import completed
from cxl_offload.plan.hardware import Hardware
from cxl_offload.topology import Access, DmaPath, Gpu, Link, Machine

_ASSUMED = "assumed by the planner"


def as_planned(machine: Machine, hardware: Hardware) -> Machine:
    """The machine with what plans assumed in place of every number that it lacks.

    Stores are taken as fast as loads, and copies from the GPU as those to it.
    """
    planned = {node.node: node for node in hardware.nodes}
    accesses = {(each.initiator, each.target): each for each in machine.accesses}
    for (core, number), rate in _reads(machine, hardware).items():
        at = (core, number)
        known = accesses.get(at) or Access(*at, source=_ASSUMED)
        accesses[at] = _access(known, rate, planned[number].latency_ns)
    paths = {(each.gpu, each.node): each for each in machine.dma_paths}
    if hardware.has_gpu:
        name = machine.gpus[0].name
        for number, node in planned.items():
            path = paths.get((name, number)) or DmaPath(name, number, source=_ASSUMED)
            # what nothing bounds crosses the link at its rate
            paths[name, number] = _path(path, min(node.copy_bytes_per_s, hardware.link_bytes_per_s))
    return replace(
        machine,
        accesses=tuple(accesses.values()),
        dma_paths=tuple(paths.values()),
        gpus=tuple(_gpu(gpu) for gpu in machine.gpus),
    )


def at_decoding_rates(machine: Machine) -> Machine:
    """The machine with GPUs that read their memory as fast as plans take them to while decoding."""
    return replace(machine, gpus=tuple(map(_at_decoding_rate, machine.gpus)))


def _at_decoding_rate(gpu: Gpu) -> Gpu:
    rate = gpu.memory_bandwidth_bytes_per_s
    if rate is None:
        return gpu
    return replace(gpu, memory_bandwidth_bytes_per_s=MEMORY_SHARE * rate)


def _reads(machine: Machine, hardware: Hardware) -> dict[tuple[int, int], float]:
    """Bytes/s of the cores of every socket that computes on every node."""
    near = {node.node: node.read_bytes_per_s for node in hardware.nodes}
    if not hardware.sockets:
        return {(machine.initiator, node): rate for node, rate in near.items()}
    found: dict[tuple[int, int], float] = {}
    for socket in hardware.sockets:
        rates = dict(near)
        for crossing in socket.crossings:
            rates |= crossing.rates
        found |= {(socket.node, node): rates[node] for node in near}
    return found


def _access(known: Access, rate: float, latency_ns: float) -> Access:
    read = known.read_bandwidth_bytes_per_s or rate
    latency = known.read_latency_ns or latency_ns
    return replace(
        known,
        read_bandwidth_bytes_per_s=read,
        write_bandwidth_bytes_per_s=known.write_bandwidth_bytes_per_s or read,
        read_latency_ns=latency,
        write_latency_ns=known.write_latency_ns or latency,
    )


def _path(known: DmaPath, bytes_per_s: float) -> DmaPath:
    there = known.h2d_bandwidth_bytes_per_s or bytes_per_s
    back = known.d2h_bandwidth_bytes_per_s or there
    return replace(known, h2d_bandwidth_bytes_per_s=there, d2h_bandwidth_bytes_per_s=back)


def _gpu(known: Gpu) -> Gpu:
    gpu, _ = completed(known)
    if gpu.link is None:
        return gpu
    link: Link = gpu.link
    back = link.d2h_bandwidth_bytes_per_s or link.h2d_bandwidth_bytes_per_s
    return replace(gpu, link=replace(link, d2h_bandwidth_bytes_per_s=back))
