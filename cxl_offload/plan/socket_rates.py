"""Which sockets compute, and what their cores read where, with what had to be assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.sockets import Crossing, Socket
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.topology import Machine, Node, NodeKind
from cxl_offload.topology.model import NO_PATH_DISTANCE


def socket_nodes(machine: Machine, most: int) -> tuple[int, ...]:
    """The nodes of the cores of so many sockets: the initiator's, then the nearest others.

    Raises
    ------
    ConfigError
        The machine has fewer sockets, or one of them has several nodes with CPUs.
    """
    if most < 1:
        raise ConfigError(f"{most} sockets: at least 1")
    if most == 1:
        return (machine.initiator,)
    every = _by_socket(machine)
    if most > len(every):
        raise ConfigError(
            f"{most} sockets: {machine.name} has {len(every)} with CPUs; plan for no more"
        )
    several = next((nodes for nodes in every if len(nodes) > 1), None)
    if several is not None:
        raise ConfigError(
            f"{most} sockets: nodes {', '.join(map(str, several))} of {machine.name} are of one "
            "socket (sub-NUMA clustering), and plans for several sockets know one node of CPUs "
            "each; leave the option out"
        )
    nodes = [node for (node,) in every]
    nodes.sort(key=lambda node: (node != machine.initiator, _distance(machine, node), node))
    return tuple(nodes[:most])


def sockets_with_cores(machine: Machine) -> int:
    """How many sockets plans know; 1 where one has several nodes with CPUs."""
    every = _by_socket(machine)
    return len(every) if all(len(nodes) == 1 for nodes in every) else 1


def _by_socket(machine: Machine) -> list[list[int]]:
    """Nodes with CPUs, those of one socket together; a node of no known socket is one."""
    every: dict[tuple[str, int], list[int]] = {}
    for node in machine.nodes:
        if node.cpus and node.online:
            key = ("node", node.id) if node.socket is None else ("socket", node.socket)
            every.setdefault(key, []).append(node.id)
    return list(every.values())


def _distance(machine: Machine, node: int) -> int:
    found = machine.distance(machine.initiator, node)
    return NO_PATH_DISTANCE if found is None else found


@dataclass(frozen=True, slots=True)
class SocketRates:
    """Bytes/s of cores on nodes.

    Attributes
    ----------
    rates
        Reads the machine, and takes the notes.
    cores
        Nodes of the cores, the initiator's first.
    nodes
        That are planned with.
    """

    rates: MachineRates
    cores: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def machine(self) -> Machine:
        """Whose they are."""
        return self.rates.machine

    def near(self, node: Node) -> int | None:
        """The node of the cores of a node's own socket; None: those do not compute."""
        if node.id in self.cores:
            return node.id
        if node.socket is not None:
            sockets = {self.machine.node(each).socket: each for each in self.cores}
            return sockets.get(node.socket)
        return min(self.cores, key=lambda near: self._hops(near, node.id))

    def _hops(self, core: int, node: int) -> int:
        found = self.machine.distance(core, node)
        return NO_PATH_DISTANCE if found is None else found

    def reach(self, core: int, node: int) -> float:
        """Bytes/s of the cores of one socket on a node, printed, measured, or as the first's."""
        if core == self.cores[0]:
            tier = self.machine.tier_of(node)
            name = "rdram" if tier is None else tier.name
            return self.rates.planned_read_bytes_per_s(name, [node])
        access = self.machine.access(core, node)
        if access is not None and access.read_bandwidth_bytes_per_s is not None:
            return access.read_bandwidth_bytes_per_s
        first, machine = self.cores[0], self.machine
        self.rates.note(
            f"{machine.name} has no bandwidth of some paths from the cores of node {core}: taken "
            f"as that of node {first}'s at the same distance; cxl-offload profile measures it"
        )
        fewer = len(machine.node(core).cpus) / max(1, len(machine.node(first).cpus))
        return self._mirrored(core, machine.node(node)) * min(1.0, fewer)

    def _mirrored(self, core: int, node: Node) -> float:
        first = self.cores[0]
        if node.id == core:
            return self.reach(first, first)
        if node.id == first:
            return self.reach(first, core)
        if node.kind is NodeKind.DRAM or self.near(node) == core:
            return self.reach(first, node.id)
        link = self.reach(first, core)  # of memory beyond the link, no more than the link carries
        return min(self.reach(first, node.id), link)

    def sockets(self) -> tuple[Socket, ...]:
        """The cores, and all memory that is not near them by the socket that it is near to."""
        nodes = [self.machine.node(node) for node in self.nodes]
        found = []
        for core in self.cores:
            crossings = []
            for other in (*self.cores, None):
                away = [node.id for node in nodes if self.near(node) == other]
                if other == core or not away:
                    continue
                reached = {node: self.reach(core, node) for node in away}
                link = max(reached.values())
                if other is not None:
                    link = max(link, self.reach(core, other))
                crossings.append(Crossing(reached, link))
            found.append(Socket(core, len(self.machine.node(core).cpus), tuple(crossings)))
        return tuple(found)

    def most(self, node: int) -> float:
        """What a node gives to all of the cores together: the most that those of one reach."""
        return max(self.reach(core, node) for core in self.cores)


def socket_rates(rates: MachineRates, nodes: Sequence[int], most: int) -> SocketRates | None:
    """Several sockets; None where the initiator's computes alone.

    Parameters
    ----------
    nodes
        That are planned with.
    most
        Sockets that compute.

    Raises
    ------
    ConfigError
        As :func:`socket_nodes`.
    """
    cores = socket_nodes(rates.machine, most)
    return None if len(cores) == 1 else SocketRates(rates, cores, tuple(nodes))
