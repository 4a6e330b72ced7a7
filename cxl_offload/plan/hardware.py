"""A machine as planners see it: nodes with room and rates, a GPU, perhaps a drive."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.core import POOL_SLACK_SHARE, reserve_bytes
from cxl_offload.errors import ConfigError
from cxl_offload.plan.asked_tiers import NVME as NVME
from cxl_offload.plan.asked_tiers import check_limits, has_drive, host_names
from cxl_offload.plan.equations.sockets import Socket, even_rates, link_costs
from cxl_offload.plan.gpu import NO_GPU, GpuRates
from cxl_offload.plan.machine_rates import UNBOUND, MachineRates
from cxl_offload.plan.missing import MissingNumberError
from cxl_offload.plan.socket_rates import socket_rates
from cxl_offload.plan.usable import GPU_USABLE, HOST_USABLE
from cxl_offload.renamed import old_names
from cxl_offload.topology import Machine, Node, NodeKind

GPU = "gpu"
"""What plans call the memory of the accelerator."""

LOCAL = "ldram"
"""The tier that calibrated rates refer to."""


_POOL_LEAST = 1 << 20
"""What pools may have mapped beyond their slack: at most 64 KiB and a slab or two for each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNode:
    """One node: what may be planned on it, and its rates.

    ``name`` is how policies call it: its tier, or its number where the tier has several nodes.
    ``latency_ns`` is that of the initiator's CPUs, ``read_bytes_per_s`` what the node gives to all
    CPUs that compute, ``copy_bytes_per_s`` what it delivers to the GPU's copy engine, apart from
    the link; ``other_copies`` is that of the machine's other GPUs in their order, each from its
    socket, and ``given_bytes_per_s`` the most that it is known to give the CPUs of any of these.
    """

    name: str
    tier: str
    node: int
    usable_bytes: float
    read_bytes_per_s: float
    latency_ns: float
    copy_bytes_per_s: float
    other_copies: tuple[float, ...] = ()
    given_bytes_per_s: float = 0.0

    @property
    def where(self) -> str:
        """How a plan calls it."""
        return self.tier if self.name == self.tier else f"{self.tier} node {self.name}"

    def copy_bytes_per_s_of(self, gpus: int) -> float:
        """What the node delivers to several GPUs at once; ``copy_bytes_per_s`` is of the first.

        Those that the machine does not have are like the first.
        """
        one, others = self.copy_bytes_per_s, self.other_copies[: gpus - 1]
        most = max(self.read_bytes_per_s, self.given_bytes_per_s)
        most = most if one == UNBOUND else max(one, most)
        return min((gpus - len(others)) * one + sum(others), most)


@dataclass(frozen=True)  # no slots: a search asks for the cached properties thousands of times
class Hardware:
    """Nodes in the order of their tiers, the fastest of a tier first; without a drive of known rate
    its bytes are 0.

    Where there is no GPU, ``gpu`` is :data:`cxl_offload.plan.gpu.NO_GPU`, without memory.

    ``local_latency_ns`` is that of local DRAM, which calibrated rates refer to. ``cores`` are those
    of all ``sockets`` that compute, of which there are none named where it is the initiator's
    alone; ``copies`` says whether weights may have a copy near each. ``other_links`` are those of
    the machine's other GPUs. ``notes`` say what had to be assumed of the machine.
    """

    machine: str
    nodes: tuple[HostNode, ...]
    link_bytes_per_s: float
    local_latency_ns: float
    gpu: GpuRates
    gpu_memory_bytes: float
    gpu_usable_bytes: float
    cores: int
    drive_read_bytes_per_s: float = 0.0
    drive_write_bytes_per_s: float = 0.0
    drive_usable_bytes: float = 0.0
    notes: tuple[str, ...] = ()
    sockets: tuple[Socket, ...] = ()
    copies: bool = True
    other_links: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the host's nodes, as policies have them."""
        return tuple(node.name for node in self.nodes)

    @functools.cached_property
    def usable_bytes(self) -> float:
        """Of all nodes together."""
        return sum(node.usable_bytes for node in self.nodes)

    @functools.cached_property
    def read_bytes_per_s(self) -> float:
        """What all nodes together give to CPUs."""
        return sum(node.read_bytes_per_s for node in self.nodes)

    @functools.cached_property
    def copy_bytes_per_s(self) -> float:
        """What all nodes together give to the GPU's copies, were its link faster."""
        return sum(node.copy_bytes_per_s for node in self.nodes)

    @functools.cached_property
    def has_gpu(self) -> bool:
        """Whether there is a GPU to compute on."""
        return self.gpu != NO_GPU

    @property
    def even_rates(self) -> tuple[float, ...]:
        """What every node gives to CPUs, of whose work each socket has its part."""
        rates = {node.node: node.read_bytes_per_s for node in self.nodes}
        return even_rates(rates, self.sockets)

    @property
    def link_costs(self) -> list[dict[int, float]]:
        """What a byte that they read occupies of every link between sockets, by node's place."""
        return link_costs([node.node for node in self.nodes], self.sockets)

    @functools.cached_property
    def copy_nodes(self) -> tuple[int, ...]:
        """Places of the nodes that weights could have copies on; none: they cannot."""
        at = {node.node: place for place, node in enumerate(self.nodes)}
        near = [at[socket.node] for socket in self.sockets if socket.node in at]
        every = self.copies and not self.has_gpu and len(near) == len(self.sockets)
        return tuple(near) if every else ()

    @functools.cached_property
    def near_bytes_per_s(self) -> float:
        """What all sockets read together of copies near them."""
        return sum(self.nodes[place].read_bytes_per_s for place in self.copy_nodes)

    def rooms(self) -> dict[str, float]:
        """Usable bytes of every node, and of the GPU and the drive where there is one."""
        found = {node.name: node.usable_bytes for node in self.nodes}
        if self.has_gpu:
            found[GPU] = self.gpu_usable_bytes
        if self.drive_usable_bytes:
            found[NVME] = self.drive_usable_bytes
        return found

    def without(self, name: str) -> Hardware:
        """The same without one tier."""
        if name == NVME:
            return replace(self, drive_usable_bytes=0.0)
        return replace(self, nodes=tuple(node for node in self.nodes if node.tier != name))

    def with_less_room(self, share: float) -> Hardware:
        """The same without a share of the room of every node."""
        nodes = (replace(each, usable_bytes=each.usable_bytes * (1 - share)) for each in self.nodes)
        return replace(self, nodes=tuple(nodes))

    def of_gpus(self, gpus: int) -> Hardware:
        """Links and copies of several GPUs together, each with a link of its own to the host.

        A node gives each of them what it gives that GPU on its socket, until it gives all that CPUs
        can read there. GPUs that the machine does not have are like its first.
        """
        if gpus == 1:
            return self
        nodes = [
            replace(node, copy_bytes_per_s=node.copy_bytes_per_s_of(gpus)) for node in self.nodes
        ]
        others = self.other_links[: gpus - 1]
        links = (gpus - len(others)) * self.link_bytes_per_s + sum(others)
        return replace(self, link_bytes_per_s=links, nodes=tuple(nodes))

    def node_bytes(self, host: Sequence[int]) -> dict[int, int]:
        """Bytes by the number of the node, of bytes in the order of ``nodes``."""
        return {node.node: nbytes for node, nbytes in zip(self.nodes, host, strict=True)}


def _usable(machine: Machine) -> tuple[Node, ...]:
    """Nodes that memory is planned on; those of accelerators where a machine has no other, or
    where its CPUs' own memory is such: a card beside it takes nothing away.
    """
    own = any(node.id == machine.initiator and node.kind is NodeKind.GPU for node in machine.nodes)
    return (() if own else machine.usable_nodes()) or machine.usable_nodes(include_gpu_memory=True)


def hardware_of(
    machine: Machine,
    *,
    tiers: Sequence[str] | None = None,
    limits: Mapping[str, int] | None = None,
    host_usable: float = HOST_USABLE,
    gpu_usable: float = GPU_USABLE,
    needs_gpu: bool = True,
    sockets: int = 1,
) -> Hardware:
    """What may be planned with.

    Parameters
    ----------
    tiers
        Tiers that may be used; all of the machine by default, ``nvme`` included.
    limits
        Tier to the most bytes of it that may be planned.
    needs_gpu
        Whether a machine without a GPU of known rates is refused; else its CPUs compute.
    sockets
        Whose cores compute: the initiator's and the nearest others.

    Raises
    ------
    ConfigError
        A tier or limit the machine does not have, a limit of a tier that is left out or above its
        capacity, shares outside 0..1, no usable memory, no GPU or one without peaks.
    """
    for what, share in (("host", host_usable), ("GPU", gpu_usable)):
        if not 0 < share <= 1:
            raise ConfigError(f"usable share of {what} memory {share:g}: above 0 and at most 1")
    names = host_names(machine, {node.id for node in _usable(machine)}, tiers)
    if not names:
        message = f"{machine.name}: no host tier with memory to plan for"
        raise MissingNumberError(message, section="tiers")
    limits = dict(limits or {})
    check_limits(machine, names, tiers, limits)
    try:
        rates = MachineRates(machine)
        missing = rates.why_no_gpu()
        if missing is not None and needs_gpu:
            raise ValueError(missing)
        found = _read(rates, names, tiers, limits, (host_usable, gpu_usable))
        return _with_sockets(found, rates, sockets)
    except ConfigError:
        raise
    except ValueError as error:
        raise MissingNumberError(str(error), section="gpus") from error


def _read(
    rates: MachineRates,
    names: Sequence[str],
    tiers: Sequence[str] | None,
    limits: Mapping[str, int],
    usable: tuple[float, float],
) -> Hardware:
    machine = rates.machine
    local_ns = rates.latencies_ns([_local(machine), *names])[0]
    why_cpus = rates.why_cpus_compute()
    has_gpu = why_cpus is None
    nodes = _in_order([list(_nodes(rates, name, limits, usable[0], has_gpu)) for name in names])
    gpu_memory = float(rates.gpu().memory_bytes or 0) if has_gpu else 0.0
    read, write, room = _drive(machine, limits, usable[0], NVME in (tiers or (NVME,)))
    if not has_gpu:
        rates.note(f"CPUs compute: {why_cpus}")
    return Hardware(
        machine=machine.name,
        nodes=nodes,
        link_bytes_per_s=rates.link_bytes_per_s() if has_gpu else UNBOUND,
        local_latency_ns=local_ns,
        gpu=rates.gpu_rates() if has_gpu else NO_GPU,
        gpu_memory_bytes=gpu_memory,
        gpu_usable_bytes=gpu_memory * usable[1],
        cores=rates.cores(),
        drive_read_bytes_per_s=read,
        drive_write_bytes_per_s=write,
        drive_usable_bytes=room,
        notes=tuple(rates.notes),
        other_links=rates.other_links() if has_gpu else (),
    )


def _with_sockets(hardware: Hardware, rates: MachineRates, most: int) -> Hardware:
    """The same where the cores of several sockets compute."""
    found = socket_rates(rates, [node.node for node in hardware.nodes], most)
    if found is None:
        return hardware
    nodes = []
    for node in hardware.nodes:
        read = found.most(node.node)
        copies = node.copy_bytes_per_s if hardware.has_gpu else read
        nodes.append(replace(node, read_bytes_per_s=read, copy_bytes_per_s=copies))
    sockets = found.sockets()
    return replace(
        hardware,
        nodes=tuple(nodes),
        cores=sum(socket.cores for socket in sockets),
        sockets=sockets,
        notes=tuple(rates.notes),
    )


def _in_order(tiers: Sequence[list[HostNode]]) -> tuple[HostNode, ...]:
    """Nodes of tiers in their order; HBM comes before the first tier but local DRAM that is slower.

    Of equally fast plans the one with most on the first nodes is taken.
    """
    first = [nodes for nodes in tiers if nodes and nodes[0].tier != "hbm"]
    for nodes in tiers:
        if nodes and nodes[0].tier == "hbm":
            slower = [
                at
                for at, others in enumerate(first)
                if others[0].tier != LOCAL
                and others[0].read_bytes_per_s < nodes[0].read_bytes_per_s
            ]
            first.insert(min(slower, default=len(first)), nodes)
    return tuple(node for nodes in first for node in nodes)


def _local(machine: Machine) -> str:
    """The tier of the initiator's own memory."""
    tier = machine.tier_of(machine.initiator)
    return LOCAL if tier is None else tier.name


def _drive(
    machine: Machine, limits: Mapping[str, int], usable: float, wanted: bool
) -> tuple[float, float, float]:
    """Rates of reading and writing, and room; 0 without a drive of known rate."""
    if not (wanted and has_drive(machine)):
        return 0.0, 0.0, 0.0
    drive = machine.drives[0]
    read = drive.read_bandwidth_bytes_per_s or 0.0
    write = min(drive.write_bandwidth_bytes_per_s or read, read)
    return read, write, _limited(NVME, drive.capacity_bytes, limits.get(NVME), usable)


def _limited(name: str, capacity: int, limit: int | None, usable: float) -> float:
    if limit is not None and limit > capacity:
        raise ConfigError(
            f"limit of {name}: {limit / 2**30:.4g} GiB, but it has {capacity / 2**30:.4g} GiB"
        )
    return min(capacity * usable, capacity if limit is None else limit)


def _node_bytes(node: Node) -> float:
    """What the memory layer can have of a node for blocks."""
    free = node.capacity_bytes
    if node.free_bytes is not None:  # the kernel drops its page cache before it refuses memory
        free = min(free, node.free_bytes + node.page_cache_bytes)
    given = free - reserve_bytes(node.capacity_bytes) - _POOL_LEAST
    return max(0.0, given / (1 + POOL_SLACK_SHARE))


def _nodes(
    rates: MachineRates, tier: str, limits: Mapping[str, int], usable: float, has_gpu: bool
) -> Iterator[HostNode]:
    """The nodes of a tier, the fastest first; a limit of the tier is used up in their order."""
    machine = rates.machine
    allowed = {node.id: node for node in _usable(machine)}
    nodes = [allowed[node] for node in machine.tier(tier).nodes if node in allowed]
    nodes.sort(key=lambda node: -rates.planned_read_bytes_per_s(tier, [node.id]))
    left = _limited(tier, sum(node.capacity_bytes for node in nodes), limits.get(tier), 1.0)
    for node in nodes:
        room = min(left, node.capacity_bytes * usable, _node_bytes(node))
        left -= room
        local = rates.latency_ns(_local(machine))
        latency = rates.latency_ns(tier, [node.id])
        if latency is None or local is None:
            latency = local or latency or 1.0
        read = rates.planned_read_bytes_per_s(tier, [node.id])
        yield HostNode(
            name=tier if len(nodes) == 1 else str(node.id),
            tier=tier,
            node=node.id,
            usable_bytes=room,
            read_bytes_per_s=read,
            latency_ns=latency,
            copy_bytes_per_s=rates.copy_bytes_per_s(tier, [node.id]) if has_gpu else read,
            other_copies=rates.other_copies(tier, node.id) if has_gpu else (),
            given_bytes_per_s=rates.given_bytes_per_s(node.id) if has_gpu else 0.0,
        )


__getattr__ = old_names(__name__)
