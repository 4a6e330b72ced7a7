"""A machine with memory or a GPU that it does not have, for plans that ask whether to buy it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.gpu_kinds import known_gpus
from cxl_offload.topology import (
    Access,
    DmaPath,
    Machine,
    Node,
    NodeKind,
    Tier,
)
from cxl_offload.units import parse_bandwidth, parse_bytes, parse_latency_ns

NO_GPU = "none"
"""Of :func:`with_gpu`: the machine without any."""

GPUS_LEFT_OUT = "GPUs are left out (--gpu none)"
"""A note of that machine where it has GPUs, so that no plan says that it has none."""

_KINDS = {
    "ldram": NodeKind.DRAM,
    "rdram": NodeKind.DRAM,
    "hbm": NodeKind.HBM,
    "cxl": NodeKind.CXL,
}


def planned_as_if(things: Sequence[str]) -> str:
    """What a plan says of itself that is for things which the machine does not have."""
    return f"planned as if {' and '.join(things)} were there"


def with_memory(machine: Machine, text: str) -> Machine:
    """The machine with one node more.

    Parameters
    ----------
    text
        ``TIER=SIZE:RATE:LATENCY``, such as ``cxl=256GiB:40GB/s:250ns``. The rate is that of CPUs
        and of the GPU's copies, which the link bounds further.

    Raises
    ------
    ConfigError
        Another form, a tier that memory cannot be added to, or no quantity.
    """
    tier, _, parts = text.partition("=")
    numbers = parts.split(":")
    if tier not in _KINDS or len(numbers) != 3:
        raise ConfigError(
            f"--add {text}: expected TIER=SIZE:RATE:LATENCY, such as cxl=256GiB:40GB/s:250ns; "
            f"tiers are {', '.join(_KINDS)}"
        )
    try:
        size, rate = parse_bytes(numbers[0]), parse_bandwidth(numbers[1])
        latency = parse_latency_ns(numbers[2])
    except ValueError as error:
        raise ConfigError(f"--add {text}: {error}") from None
    if min(size, rate, latency) <= 0:
        raise ConfigError(f"--add {text}: size, rate and latency are above 0")
    number = machine.nodes[-1].id + 1
    node = Node(number, _KINDS[tier], (), size, description=f"added: {text}")
    access = Access(machine.initiator, number, latency, latency, rate, rate, source="added")
    paths = [DmaPath(gpu.name, number, rate, rate, source="added") for gpu in machine.gpus]
    tiers = [
        Tier(each.name, (*each.nodes, number)) if each.name == tier else each
        for each in machine.tiers
    ]
    if all(each.name != tier for each in machine.tiers):
        tiers.append(Tier(tier, (number,)))
    return replace(
        machine,
        nodes=(*machine.nodes, node),
        accesses=(*machine.accesses, access),
        dma_paths=(*machine.dma_paths, *paths),
        tiers=tuple(tiers),
    )


def with_sizes(machine: Machine, sizes: Mapping[str, int]) -> Machine:
    """The machine with as much memory of a kind as asked for, in equal parts on its nodes.

    Parameters
    ----------
    sizes
        Bytes of ``dram`` and of ``cxl``; of what is not named there is as much as before, and of 0
        bytes nothing is left.

    Raises
    ------
    ConfigError
        No node of that kind that could grow.
    """
    for kind, nbytes in sizes.items():
        nodes = [node.id for node in machine.usable_nodes() if node.kind is NodeKind(kind)]
        if nbytes and not nodes:
            raise ConfigError(
                f"{machine.name} has no {kind} memory to make larger; "
                f"--add {kind}=SIZE:RATE:LATENCY says how fast it would be"
            )
        part = nbytes // max(1, len(nodes))
        resized = dict.fromkeys(nodes, part)
        machine = replace(
            machine,
            nodes=tuple(
                replace(
                    node,
                    capacity_bytes=resized.get(node.id, node.capacity_bytes),
                    free_bytes=None if node.id in resized else node.free_bytes,
                )
                for node in machine.nodes
            ),
        )
        if not nbytes:
            machine = _without(machine, nodes)
    return machine


def _without(machine: Machine, nodes: Sequence[int]) -> Machine:
    """No tier has these nodes, so no plan can use them."""
    tiers = [
        replace(tier, nodes=tuple(node for node in tier.nodes if node not in nodes))
        for tier in machine.tiers
    ]
    return replace(
        machine,
        nodes=tuple(
            replace(node, allowed=node.allowed and node.id not in nodes) for node in machine.nodes
        ),
        tiers=tuple(tier for tier in tiers if tier.nodes or tier.name == "nvme"),
    )


def with_gpu(machine: Machine, name: str) -> Machine:
    """The machine with the GPU of a machine file, and its link, in place of its own.

    What the nodes deliver to that GPU is not known: planners then take what CPUs read there, and
    say so.

    Parameters
    ----------
    name
        Of a GPU, such as ``h100``; upper and lower case are alike. ``none`` takes the machine's own
        away, so that CPUs compute.

    Raises
    ------
    ConfigError
        No machine file has such a GPU with its own memory, peaks and link.
    """
    if name.lower() == NO_GPU:
        notes = (*machine.notes, GPUS_LEFT_OUT) if machine.gpus else machine.notes
        return replace(machine, gpus=(), dma_paths=(), notes=notes)
    known = {each.gpu.name.lower(): each.gpu for each in known_gpus()}
    found = known.get(name.lower())
    if found is None:
        raise ConfigError(f"--gpu {name}: no machine file has it; known are {', '.join(known)}")
    placed = replace(found, node=machine.initiator, memory_node=None)
    return replace(machine, gpus=(placed,), dma_paths=())
