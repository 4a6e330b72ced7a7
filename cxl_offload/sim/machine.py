"""The resources of a machine, and what a byte or an operation of each engine costs on them.

``node N``        the memory of a node, reads and writes together, by CPUs and copy engines
``path I-N``      what the CPUs of node I reach on node N
``dma GPU-N``     what copies of a GPU reach on node N, each way
``link GPU``      the GPU's link to the host, each way
``switch S``      the link of a switch towards the host, up (to the host) and down
``hbm GPU``, ``compute GPU``, ``drive`` (each way), ``cpu`` (arithmetic of the initiator, ``cpu I``
of the CPUs that an event names), ``lines`` (misses that the CPUs of the initiator can have in
flight) and ``stream`` (what those CPUs work through)
"""

from __future__ import annotations

from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.renamed import old_names
from cxl_offload.sim.fabric import Fabric
from cxl_offload.sim.trace import Engine
from cxl_offload.topology import Access, Gpu, Link, Machine, NodeKind
from cxl_offload.units import NS

ReadOrWrite = Literal["read", "write"]
"""What happens to a node's memory."""

Costs = tuple[tuple[int, float], ...]
"""Resource number and seconds that one byte (or one operation) occupies it."""


class Rates:
    """Looks up what a machine gives, and numbers every resource that was asked for.

    Parameters
    ----------
    machine
        Whose nodes, links and engines are used.
    initiator
        Node whose CPUs do the work of ``cpu`` events.
    gpu
        Name of the GPU that copies and computes; ``None`` takes the first.
    fabric
        Switches in front of nodes and GPUs; what the machine file says of a node is then what it
        gives when attached directly.
    """

    def __init__(
        self, machine: Machine, *, initiator: int, gpu: str | None, fabric: Fabric | None
    ) -> None:
        machine.node(initiator)
        self.names: list[str] = []
        self.losses: dict[int, float] = {}
        self._machine = machine
        self._initiator = initiator
        self._fabric = fabric or Fabric({})
        self._index: dict[str, int] = {}
        self._gpu: Gpu | None = None
        if gpu is not None:
            self._gpu = machine.gpu(gpu)
        elif machine.gpus:
            self._gpu = machine.gpus[0]
        if fabric is not None:
            known = {str(node.id) for node in machine.nodes} | {each.name for each in machine.gpus}
            strangers = [name for name in fabric.above if name not in known]
            if strangers:
                raise ConfigError(
                    f"machine {machine.name} has no node and no GPU {strangers[0]!r}, which the "
                    f"tree of switches names; it has {', '.join(sorted(known))}"
                )

    def host(
        self, engine: Engine, way: ReadOrWrite, node: int, *, cpus: int | None = None
    ) -> Costs:
        """Of a byte that an engine reads from, or writes to, the memory of a node.

        ``cpus`` is the node whose CPUs do it, by default the initiator.

        Raises
        ------
        ConfigError
            The machine lacks a number that this needs; names it.
        ValueError
            The machine has no such node.
        """
        self._machine.node(node)
        memory = self._memory(node)
        if engine == "cpu":
            return (*memory, *self._cpu(way, node, cpus), *self._switches(way, node))
        if engine == "nvme":
            return (*memory, self._drive(way), *self._switches(way, node))
        if engine == "gpu":
            raise ConfigError(
                f"machine {self._machine.name}: a gpu event moves bytes of node {node}; what "
                "crosses the link is an h2d or a d2h event"
            )
        return (*memory, *self._copy(engine, node), *self._gpu_switches(engine, node))

    def operations(
        self, engine: Engine, *, cpu_flops_per_s: float | None, cpus: int | None = None
    ) -> Costs:
        """Of one floating point operation; none on the CPU unless its rate is given."""
        if engine == "cpu":
            if cpu_flops_per_s is None:
                return ()
            if cpus is None or cpus == self._initiator:
                return (self.cost("cpu", cpu_flops_per_s),)
            own, others = (len(self._machine.node(at).cpus) for at in (self._initiator, cpus))
            return (self.cost(f"cpu {cpus}", cpu_flops_per_s * others / max(1, own)),)
        gpu = self._some_gpu()
        peak = self._required(gpu.peak_flops_per_s, f"peak of GPU {gpu.name}")
        return (self.cost(f"compute {gpu.name}", peak),)

    def accelerator(self, engine: Engine) -> Costs:
        """Of a byte in accelerator memory; copies need no rate, as their link is slower."""
        if engine in ("cpu", "nvme"):
            return ()
        gpu = self._some_gpu()
        rate = gpu.memory_bandwidth_bytes_per_s
        if engine == "gpu":
            rate = self._required(rate, f"memory bandwidth of GPU {gpu.name}")
        return () if rate is None else (self.cost(f"hbm {gpu.name}", rate),)

    def link(self, way: Literal["h2d", "d2h"]) -> tuple[int, float]:
        """Of a byte over the GPU's link."""
        link, name = self._some_link(), self._some_gpu().name
        rate = link.h2d_bandwidth_bytes_per_s if way == "h2d" else link.d2h_bandwidth_bytes_per_s
        return self.cost(
            f"link {name} {way}", self._required(rate, f"{way} bandwidth of the link of GPU {name}")
        )

    def setup_s(self, nodes: tuple[int, ...]) -> float:
        """Of one copy that touches these nodes; a machine file without one charges none."""
        gpu = self._some_gpu()
        extra_ns = 0.0
        for node in nodes:
            path = self._machine.dma_path(gpu, node)
            own_ns = (path.extra_latency_ns or 0.0) if path is not None else 0.0
            extra_ns = max(extra_ns, own_ns + self._fabric.latency_ns(str(node)))
        gpu_ns = self._fabric.latency_ns(gpu.name)
        return (self._some_link().setup_s or 0.0) + (extra_ns + gpu_ns) * NS

    def latency_ns(self, node: int) -> float:
        """Idle latency of the initiator on a node, switches on the way included."""
        where = self._where(node)
        idle = self._required(self._access(node).read_latency_ns, f"latency {where}")
        return idle + self._fabric.latency_ns(str(node))

    def read_bytes_per_s(self, node: int) -> float:
        """What the initiator's loads reach on a node."""
        rate = self._access(node).read_bandwidth_bytes_per_s
        return self._required(rate, f"read bandwidth {self._where(node)}")

    def node_bytes_per_s(self, node: int) -> float | None:
        """The most that is known to reach the memory of a node."""
        rates: list[float | None] = []
        for access in self._machine.accesses:
            if access.target == node:
                rates += [access.read_bandwidth_bytes_per_s, access.write_bandwidth_bytes_per_s]
        for path in self._machine.dma_paths:
            if path.node == node:
                rates += [path.h2d_bandwidth_bytes_per_s, path.d2h_bandwidth_bytes_per_s]
        return max((rate for rate in rates if rate is not None), default=None)

    def cost(self, name: str, rate: float) -> tuple[int, float]:
        """The number of a resource, new names getting the next one, and seconds a unit."""
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name], 1.0 / rate

    def _missing(self, what: str) -> ConfigError:
        where = self._machine.source or self._machine.name
        return ConfigError(
            f"machine {self._machine.name} ({where}): no {what}; a replay needs it, add it to the "
            "machine file or measure it with cxl-offload profile"
        )

    def _required(self, value: float | None, what: str) -> float:
        if value is None or not value > 0:
            raise self._missing(what)
        return value

    def _some_gpu(self) -> Gpu:
        if self._gpu is None:
            raise self._missing("GPU")
        return self._gpu

    def _some_link(self) -> Link:
        gpu = self._some_gpu()
        if gpu.link is None:
            raise self._missing(f"link of GPU {gpu.name}")
        return gpu.link

    def _where(self, node: int, cpus: int | None = None) -> str:
        return f"from node {self._initiator if cpus is None else cpus} to node {node}"

    def _access(self, node: int, cpus: int | None = None) -> Access:
        access = self._machine.access(self._initiator if cpus is None else cpus, node)
        if access is None:
            raise self._missing(f"bandwidth {self._where(node, cpus)}")
        return access

    def _memory(self, node: int) -> Costs:
        rate = self.node_bytes_per_s(node)
        return () if rate is None else (self.cost(f"node {node}", rate),)

    def _cpu(self, way: ReadOrWrite, node: int, cpus: int | None) -> Costs:
        access = self._access(node, cpus)
        rate = (
            access.read_bandwidth_bytes_per_s
            if way == "read"
            else access.write_bandwidth_bytes_per_s
        )
        rate = self._required(rate, f"{way} bandwidth {self._where(node, cpus)}")
        return (self.cost(f"path {access.initiator}-{node}", rate),)

    def _copy(self, way: Literal["h2d", "d2h"], node: int) -> Costs:
        gpu = self._some_gpu()
        dma = self._machine.dma_bandwidth(gpu, node, direction=way)
        if dma is not None:
            return (self.link(way), self.cost(f"dma {gpu.name}-{node} {way}", dma))
        link = self.link(way)
        if self._machine.node(node).kind is NodeKind.CXL:
            # DRAM is taken to keep up with a link; CXL memory may well not, and what CPUs reach
            # on it says little about copies (Wang et al., Hitchhiker's Guide, Table 6).
            raise self._missing(f"{way} DMA bandwidth of GPU {gpu.name} on node {node}")
        return (link,)

    def _drive(self, way: ReadOrWrite) -> tuple[int, float]:
        """What is loaded is written into node memory; what is stored is read from it."""
        if not self._machine.drives:
            raise self._missing("drive")
        drive = self._machine.drives[0]
        if way == "write":
            rate, what = drive.read_bandwidth_bytes_per_s, "read"
        else:
            rate, what = drive.write_bandwidth_bytes_per_s, "write"
        rate = self._required(rate, f"{what} bandwidth of drive {drive.name}")
        return self.cost(f"drive {what}", rate)

    def _switches(self, way: ReadOrWrite, node: int) -> Costs:
        """Between the host and a node: what is read comes up, what is written goes down."""
        ends = (str(node), None) if way == "read" else (None, str(node))
        return self._hops(*ends, direct=False)

    def _gpu_switches(self, way: Literal["h2d", "d2h"], node: int) -> Costs:
        gpu = self._some_gpu()
        direct = gpu.peer_to_peer_cxl and self._machine.node(node).kind is NodeKind.CXL
        ends = (str(node), gpu.name) if way == "h2d" else (gpu.name, str(node))
        return self._hops(*ends, direct=direct)

    def _hops(self, source: str | None, target: str | None, *, direct: bool) -> Costs:
        costs = []
        for switch, direction in self._fabric.route(source, target, direct=direct):
            link = self._fabric.links[switch]
            cost = self.cost(f"switch {switch} {direction}", link.bandwidth_bytes_per_s)
            if link.congestion_loss > 0:
                self.losses[cost[0]] = link.congestion_loss
            costs.append(cost)
        return tuple(costs)


__getattr__ = old_names(__name__)
