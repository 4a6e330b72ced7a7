"""A machine as FlexGen's planner sees it: nodes with room and rates, a GPU, perhaps a drive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.terms import FlexGenMachine, HostTier
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.missing import MissingNumberError
from cxl_offload.plan.preset import MachineNumbers
from cxl_offload.topology import Machine, Node, Tier
from cxl_offload.topology.model import TIER_NAMES

__all__ = ["GPU_USABLE", "HOST_USABLE", "Hardware", "HostRoom", "flexgen_hardware"]

GPU_USABLE = 0.8
"""Share of GPU memory to plan with: FlexGen's alpha_g (experimental/cost_model.py)."""

HOST_USABLE = 0.95
"""Share of host and drive capacity to plan with; the rest is left to the system, the framework's
own buffers and page tables. Assumed."""

NVME = "nvme"


_RESERVE_SHARE = 1 / 128
_RESERVE_LEAST, _RESERVE_MOST = 16 << 20, 1 << 30
"""What the memory layer never takes of a node: 1/128 of it, 16 MiB to 1 GiB (memory/layout.h)."""

_POOL_SHARE = 1 / 128
_POOL_LEAST = 1 << 20
"""What pools may have mapped beyond their blocks (memory/pool.h): 1/128, and at most 64 KiB and a
slab or two for each of the roles."""


@dataclass(frozen=True, slots=True)
class HostRoom:
    """One node: its rates, what it can hold, and what may be planned.

    ``name`` is how policies call it: its tier, or its number where the tier has several nodes.
    """

    rates: HostTier
    tier: str
    node: int
    usable_bytes: float

    @property
    def name(self) -> str:
        """How policies call it."""
        return self.rates.name


@dataclass(frozen=True, slots=True)
class Hardware:
    """Nodes of the tiers, fastest first; without a drive of known rate its bytes are 0."""

    machine: str
    tiers: tuple[HostRoom, ...]
    link_bytes_per_s: float
    local_latency_ns: float
    gpu: GpuRates
    gpu_usable_bytes: float
    cores: int
    drive_read_bytes_per_s: float = 0.0
    drive_write_bytes_per_s: float = 0.0
    drive_usable_bytes: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the host's nodes, as policies have them."""
        return tuple(tier.name for tier in self.tiers)

    def without(self, name: str) -> Hardware:
        """The same without one tier."""
        if name == NVME:
            return replace(self, drive_usable_bytes=0.0)
        return replace(self, tiers=tuple(tier for tier in self.tiers if tier.tier != name))

    def rates(self) -> FlexGenMachine:
        """What the equations need of it."""
        return FlexGenMachine(
            tiers=tuple(tier.rates for tier in self.tiers),
            local_latency_ns=self.local_latency_ns,
            link_bytes_per_s=self.link_bytes_per_s,
            gpu=self.gpu,
            cores=self.cores,
            drive_read_bytes_per_s=self.drive_read_bytes_per_s or None,
            drive_write_bytes_per_s=self.drive_write_bytes_per_s or None,
        )


def _host_names(machine: Machine, wanted: Sequence[str] | None) -> tuple[str, ...]:
    usable = {node.id for node in machine.usable_nodes()}
    have = [
        name
        for name in TIER_NAMES
        for tier in machine.tiers
        if tier.name == name and usable & set(tier.nodes)
    ]
    if wanted is None:
        return tuple(have)
    for name in wanted:
        if name != NVME and name not in have:
            raise ConfigError(
                f"tier {name}: {machine.name} has no such tier with memory that may be used; its "
                f"tiers are {', '.join(have)}"
            )
    return tuple(name for name in have if name in wanted)


def flexgen_hardware(
    machine: Machine,
    *,
    tiers: Sequence[str] | None = None,
    limits: Mapping[str, int] | None = None,
    host_usable: float = HOST_USABLE,
    gpu_usable: float = GPU_USABLE,
) -> tuple[Hardware, tuple[str, ...]]:
    """The hardware, and sentences on what had to be assumed of it.

    Parameters
    ----------
    tiers
        Tiers that may be used; all of the machine by default, ``nvme`` included.
    limits
        Tier to the most bytes of it that may be planned.

    Raises
    ------
    ConfigError
        A tier or limit the machine does not have, a limit above the capacity, shares outside 0..1,
        no usable memory, no GPU or one without peaks.
    """
    for what, share in (("host", host_usable), ("GPU", gpu_usable)):
        if not 0 < share <= 1:
            raise ConfigError(f"usable share of {what} memory {share:g}: above 0 and at most 1")
    numbers = MachineNumbers(machine)
    names = _host_names(machine, tiers)
    if not names:
        message = f"{machine.name}: no host tier with memory to plan for"
        raise MissingNumberError(message, section="tiers")
    limits = dict(limits or {})
    for name in limits:
        if name not in names and not (name == NVME and machine.drives):
            raise ConfigError(
                f"limit of {name}: {machine.name} offers {', '.join(names)}; name one of them"
            )
    try:
        rates = numbers.flexgen_machine(names)
        rooms = tuple(
            room for name in names for room in _rooms(numbers, name, limits.get(name), host_usable)
        )
        gpu = numbers.gpu()
    except ValueError as error:
        raise MissingNumberError(str(error), section="gpus") from error
    if gpu.memory_bytes is None:
        message = f"machine {machine.name}: GPU {gpu.name} has no memory size"
        raise MissingNumberError(message, section="gpus")
    drive = machine.drives[0] if machine.drives else None
    with_drive = drive is not None and rates.drive_read_bytes_per_s is not None
    if tiers is not None and NVME not in tiers:
        with_drive = False
    drive_bytes = 0.0
    if with_drive and drive is not None:
        drive_bytes = _limited(NVME, drive.capacity_bytes, limits.get(NVME), host_usable)
    read = rates.drive_read_bytes_per_s if with_drive else None
    return Hardware(
        machine=machine.name,
        tiers=rooms,
        link_bytes_per_s=rates.link_bytes_per_s,
        local_latency_ns=rates.local_latency_ns,
        gpu=rates.gpu,
        gpu_usable_bytes=gpu.memory_bytes * gpu_usable,
        cores=rates.cores,
        drive_read_bytes_per_s=read or 0.0,
        drive_write_bytes_per_s=(rates.drive_write_bytes_per_s or read or 0.0) if read else 0.0,
        drive_usable_bytes=drive_bytes,
    ), tuple(numbers.notes)


def _limited(name: str, capacity: int, limit: int | None, usable: float) -> float:
    if limit is not None and limit > capacity:
        raise ConfigError(
            f"limit of {name}: {limit / 2**30:.4g} GiB, but it has {capacity / 2**30:.4g} GiB"
        )
    return min(capacity * usable, capacity if limit is None else limit)


def _node_bytes(node: Node) -> float:
    """What the memory layer can have of a node for blocks."""
    kept = min(max(node.capacity_bytes * _RESERVE_SHARE, _RESERVE_LEAST), _RESERVE_MOST)
    free = node.capacity_bytes if node.free_bytes is None else node.free_bytes
    return max(0.0, (free - kept - _POOL_LEAST) / (1 + _POOL_SHARE))


def _rooms(
    numbers: MachineNumbers, name: str, limit: int | None, usable: float
) -> Iterator[HostRoom]:
    """The nodes of a tier; a limit of the tier is used up in their order."""
    machine = numbers.machine
    allowed = {node.id: node for node in machine.usable_nodes()}
    nodes = [allowed[node] for node in machine.tier(name).nodes if node in allowed]
    left = _limited(name, sum(node.capacity_bytes for node in nodes), limit, 1.0)
    for node in nodes:
        # the same machine with this node for the whole tier: its rates alone
        tiers = tuple(
            Tier(name, (node.id,)) if tier.name == name else tier for tier in machine.tiers
        )
        alone = MachineNumbers(replace(machine, tiers=tiers))
        (rates,) = alone.flexgen_machine([name]).tiers
        for text in alone.notes:
            numbers.note(text)
        room = min(left, node.capacity_bytes * usable, _node_bytes(node))
        left -= room
        called = name if len(nodes) == 1 else str(node.id)
        yield HostRoom(replace(rates, name=called), name, node.id, room)
