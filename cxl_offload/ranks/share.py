"""Several processes of a job on one machine: each takes what is near its GPU, and its share.

Only ``torch.distributed`` is used: every rank tells all others its machine and what it needs, and
those of one machine divide its nodes in the same way. No file, no lock and no daemon.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cxl_offload.errors import CxlOffloadError
from cxl_offload.memory import Session
from cxl_offload.memory.limits import RoomLimits, checked_limits
from cxl_offload.plan.rank_shares import Member, NodeRequest, assign_homes, divide_nodes
from cxl_offload.renamed import renamed_attribute, renamed_keywords
from cxl_offload.topology import Machine, discover, seen_from
from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank may use of its machine.

    Attributes
    ----------
    rank, world_size
        In the group.
    local_rank, local_size
        Among the ranks of this machine, in order of rank.
    gpu
        Name of its GPU, None on a machine without.
    home
        The node next to the GPU, from which ``ldram`` and the other tiers are named.
    node_bytes
        Node id to the most bytes that it may hold there. Over the ranks of the machine they sum
        to what each node has.
    machine
        As seen from ``home``.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    gpu: str | None
    home: int
    node_bytes: Mapping[int, int]
    machine: Machine

    def session(self) -> Session:
        """A session that keeps within ``node_bytes``; :func:`cxl_offload.use` puts it to use."""
        if self.machine.simulated:
            return Session.simulated(self.machine, limits=self.node_bytes, initiator=self.home)
        return Session.linux(self.machine, limits=self.node_bytes)

    memory = renamed_attribute("memory", "session")

    def __str__(self) -> str:
        parts = ", ".join(f"node {node}: {format_bytes(n)}" for node, n in self.node_bytes.items())
        return (
            f"rank {self.rank} ({self.local_rank + 1} of {self.local_size} on this machine), "
            f"GPU {self.gpu or 'none'}, at node {self.home}: {parts}"
        )


@renamed_keywords(capacities="limits")
def share_machine(
    machine: Machine | None = None,
    *,
    requests: Mapping[int | str, int] | None = None,
    limits: RoomLimits | None = None,
    gpu: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> RankShare:
    """Divides the nodes of each machine among the ranks of a job that run there.

    All ranks of the group call it, and all return or all raise. Without ``torch.distributed`` the
    process is alone and gets everything.

    Parameters
    ----------
    machine
        None reads this one.
    requests
        Bytes that this rank must get: node id, or name of a tier as seen from its home, to bytes.
        What no rank asked for is divided equally, kind by kind (DRAM, CXL, HBM), nearest nodes
        first. GPU memory that shows up as a node goes to the ranks on that GPU.
    limits
        Node id, or name of a tier that has one node, to the most that all ranks of this machine may
        hold: bytes, or a text such as ``"4GiB"``. Other nodes count with all their memory (what is
        free, on a simulated machine). Of different wishes the least holds.
    gpu
        Name or PCI address; None is torch's current CUDA device, or one by the order of ranks.
    group
        None is the default group.

    Raises
    ------
    ValueError
        Requests of one machine do not fit together; or what a rank gave is wrong. The message
        names the rank, on all of them.
    """
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if _is_job() else (0, 1)
    try:
        machine = machine or discover()
        told: Any = _tell(machine, rank, requests, limits, gpu)
    except (ValueError, OSError, CxlOffloadError) as error:
        told = f"rank {rank}: {error}"
    everybody = _exchange(told, size, group)
    _raise_first(everybody)
    assert machine is not None
    mine = [other for other in everybody if other["host"] == told["host"]]
    local = [other["rank"] for other in mine].index(rank)
    try:
        answer: Any = _divide(machine, mine) if local == 0 else None
    except ValueError as error:
        answer = str(error)
    # One rank of each machine divides, so that no two can come to different ends.
    answers = _exchange(answer, size, group)
    _raise_first(answers)
    members, shares = answers[mine[0]["rank"]]
    home = members[local].home
    share = RankShare(
        rank,
        size,
        local,
        len(mine),
        members[local].gpu,
        home,
        shares[local],
        seen_from(machine, home),
    )
    _logger.info("%s", share)
    return share


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _exchange(mine: Any, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    if not _is_job():
        return [mine]
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _raise_first(told: Sequence[Any]) -> None:
    for message in told:
        if isinstance(message, str):
            raise ValueError(message)


def _host(machine: Machine) -> str:
    """The running kernel: containers of one machine share its memory, whatever their names."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = os.uname().nodename
    return f"{boot} {machine.name if machine.simulated else ''}"


def _tell(
    machine: Machine,
    rank: int,
    requests: Mapping[int | str, int] | None,
    limits: RoomLimits | None,
    gpu: str | None,
) -> dict[str, Any]:
    """What this rank says of itself; plain data."""
    name = _own_gpu(machine) if gpu is None else machine.gpu(gpu).name
    held_to, devices = checked_limits(machine, limits or {})
    for device in devices:
        raise ValueError(f"limit of {device}: ranks share nodes only; leave it out")
    wanted = dict(requests or {})
    for what, nbytes in wanted.items():
        if nbytes < 0:
            raise ValueError(f"requests {nbytes} bytes of {what!r}; give 0 or more")
        if isinstance(what, int):
            machine.node(what)
    usable = machine.usable_nodes(include_gpu_memory=True)
    return {
        "host": _host(machine),
        "rank": rank,
        "gpu": name,
        "home": None if name is not None else _bound_to(machine),
        "requests": wanted,
        "room": {node.id: _room(node, machine, held_to) for node in usable},
    }


def _room(node: Any, machine: Machine, limits: Mapping[int, int]) -> int:
    free = node.free_bytes if machine.simulated else None
    total: int = node.capacity_bytes if free is None else free
    return min(total, limits.get(node.id, total))


def _own_gpu(machine: Machine) -> str | None:
    """The GPU that torch uses in this process, where both know its address."""
    if not machine.gpus or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    domain, bus, device = (
        getattr(found, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")
    )
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return next((gpu.name for gpu in machine.gpus if gpu.pci_address == address), None)


def _bound_to(machine: Machine) -> int | None:
    """The node that this process is bound to: it may use no CPUs of others. None: not bound."""
    if machine.simulated:
        return None
    cpus = os.sched_getaffinity(0)
    nodes = [node.id for node in machine.nodes if cpus & set(node.cpus)]
    return nodes[0] if len(nodes) == 1 else None


def _divide(machine: Machine, told: Sequence[dict[str, Any]]) -> Any:
    """Members with homes, and the bytes of each."""
    members = assign_homes(
        machine,
        [
            Member(other["rank"], other["gpu"], other["home"], frozenset(other["room"]))
            for other in told
        ],
    )
    members = [
        replace(member, requests=_requests(machine, member, other["requests"]))
        for member, other in zip(members, told, strict=True)
    ]
    nodes = sorted({node for other in told for node in other["room"]})
    capacities = {
        node: min(other["room"][node] for other in told if node in other["room"]) for node in nodes
    }
    return members, divide_nodes(machine, capacities, members)


def _requests(
    machine: Machine, member: Member, wanted: Mapping[int | str, int]
) -> tuple[NodeRequest, ...]:
    """Tiers as seen from the member's home."""
    assert member.home is not None
    seen = seen_from(machine, member.home)
    made = []
    for what, nbytes in wanted.items():
        try:
            nodes = (what,) if isinstance(what, int) else seen.tier(what).nodes
        except ValueError as error:
            raise ValueError(f"rank {member.rank}: {error}") from None
        name = f"node {what}" if isinstance(what, int) else f"tier {what}"
        made.append(NodeRequest(name, nodes, nbytes))
    return tuple(made)
