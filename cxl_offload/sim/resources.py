"""What a machine lends to events, and how long each event would occupy it: its demands.

A demand is in seconds: the bytes that an event moves over a resource divided by the resource's
rate. An event alone takes the largest of its demands, because its parts (the granules of a tensor
on several nodes) move at the same time, and as a whole no faster than the slowest of them lets it.

Resources of a machine:

``node N``        the memory of a node, reads and writes together, whoever moves them
``path I-N``      what the CPUs of node I reach on node N
``dma GPU-N``     what copies of a GPU reach on node N, each way
``link GPU``      the GPU's link to the host, each way
``hbm GPU``, ``compute GPU``, ``drive`` (each way), ``cpu`` (arithmetic) and ``lines`` (misses
that the CPUs of the initiator can have in flight)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.sim.trace import Engine, Event
from cxl_offload.topology import Drive, Gpu, Link, Machine

__all__ = ["LINE_BYTES", "Demand", "Engines", "Resources"]

LINE_BYTES = 64
_NS = 1e-9

Demand = Mapping[int, float]
"""Resource index to seconds that one event alone would occupy it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Rates that machine files do not have; ``None`` charges no time for what they bound.

    Attributes
    ----------
    cpu_flops_per_s
        Arithmetic of the initiator's CPUs. Work on offloaded tensors is bound by memory, so it is
        left out unless given.
    lines_in_flight
        Cache lines that the initiator's CPUs can have under way, all threads together. By Little's
        law they bound bandwidth to ``lines_in_flight * 64 B / latency``.
    """

    cpu_flops_per_s: float | None = None
    lines_in_flight: float | None = None

    def __post_init__(self) -> None:
        for name in ("cpu_flops_per_s", "lines_in_flight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a finite number above 0, or None")


_Way = Literal["read", "write"]
_Costs = tuple[tuple[int, float], ...]
"""Resource index to seconds a byte."""


class Resources:
    """Names resources as events need them, and tells each event's demands and set-up time.

    Parameters
    ----------
    machine
        Whose nodes, links and engines are used.
    initiator
        Node whose CPUs do the work of ``cpu`` events.
    gpu
        Name of the GPU that copies and computes; ``None`` takes the first.
    engines
        Rates from elsewhere.
    """

    def __init__(
        self, machine: Machine, *, initiator: int, gpu: str | None, engines: Engines
    ) -> None:
        machine.node(initiator)
        self.names: list[str] = []
        self._machine = machine
        self._initiator = initiator
        self._engines = engines
        self._index: dict[str, int] = {}
        self._host_costs: dict[tuple[Engine, _Way, int], _Costs] = {}
        self._other_costs: dict[tuple[Engine, str], _Costs] = {}
        self._setups: dict[tuple[int, ...], float] = {}
        self._gpu: Gpu | None = None
        if gpu is not None:
            self._gpu = machine.gpu(gpu)
        elif machine.gpus:
            self._gpu = machine.gpus[0]

    def demands(self, event: Event) -> tuple[float, Demand]:
        """Set-up seconds of an event, and its demands.

        Raises
        ------
        ConfigError
            The machine lacks a number that this event needs; names it.
        """
        engine = event.engine
        wanted: dict[int, float] = {}
        reads, writes = event.read_bytes, event.write_bytes
        for node, count in reads.items():
            if count:
                _charge(wanted, self._host_cost(engine, "read", node), count)
        for node, count in writes.items():
            if count:
                _charge(wanted, self._host_cost(engine, "write", node), count)
        if event.flops:
            _charge(wanted, self._other_cost(engine, "flops"), event.flops)
        if event.accelerator_bytes:
            bare = not wanted and engine in ("h2d", "d2h")  # the host's end is no tier's memory
            what = "link and bytes" if bare else "bytes"
            _charge(wanted, self._other_cost(engine, what), event.accelerator_bytes)
        if engine not in ("h2d", "d2h"):
            return 0.0, wanted
        return self._setup_s((*reads, *writes)), wanted

    def _cost(self, name: str, rate: float) -> tuple[int, float]:
        """The number of a resource, new names getting the next one, and seconds a unit."""
        if name not in self._index:
            self._index[name] = len(self.names)
            self.names.append(name)
        return self._index[name], 1.0 / rate

    def _host_cost(self, engine: Engine, way: _Way, node: int) -> _Costs:
        key = (engine, way, node)
        costs = self._host_costs.get(key)
        if costs is None:
            memory = self._memory(node)
            if engine == "cpu":
                own = self._cpu(way, node)
            elif engine == "nvme":
                own = self._drive(way)
            elif engine == "gpu":
                raise ConfigError("a gpu event reads or writes host memory; record a copy for that")
            else:
                own = self._copy(engine, node)
            costs = self._host_costs[key] = (*memory, *own)
        return costs

    def _other_cost(self, engine: Engine, what: str) -> _Costs:
        key = (engine, what)
        costs = self._other_costs.get(key)
        if costs is None:
            costs = self._other_costs[key] = self._accelerator(engine, what)
        return costs

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

    def _memory(self, node: int) -> _Costs:
        """The memory of a node itself: at least as fast as the most that is known to reach it."""
        self._machine.node(node)
        rates: list[float | None] = []
        for access in self._machine.accesses:
            if access.target == node:
                rates += [access.read_bandwidth_bytes_per_s, access.write_bandwidth_bytes_per_s]
        for path in self._machine.dma_paths:
            if path.node == node:
                rates += [path.h2d_bandwidth_bytes_per_s, path.d2h_bandwidth_bytes_per_s]
        known = [rate for rate in rates if rate is not None]
        return (self._cost(f"node {node}", max(known)),) if known else ()

    def _copy(self, way: Literal["h2d", "d2h"], node: int) -> _Costs:
        gpu = self._some_gpu()
        costs = [self._link(way)]
        dma = self._machine.dma_bandwidth(gpu, node, direction=way)
        if dma is not None:  # without a number of its own a node is taken to keep up
            costs.append(self._cost(f"dma {gpu.name}-{node} {way}", dma))
        return tuple(costs)

    def _link(self, way: Literal["h2d", "d2h"]) -> tuple[int, float]:
        link, name = self._some_link(), self._some_gpu().name
        rate = link.h2d_bandwidth_bytes_per_s if way == "h2d" else link.d2h_bandwidth_bytes_per_s
        return self._cost(
            f"link {name} {way}", self._required(rate, f"{way} bandwidth of the link of GPU {name}")
        )

    def _setup_s(self, nodes: tuple[int, ...]) -> float:
        """Of one copy that touches these nodes."""
        setup_s = self._setups.get(nodes)
        if setup_s is None:
            gpu = self._some_gpu()
            paths = [self._machine.dma_path(gpu, node) for node in nodes]
            extra_ns = max((p.extra_latency_ns or 0.0 for p in paths if p is not None), default=0.0)
            setup_s = (self._some_link().setup_s or 0.0) + extra_ns * _NS
            self._setups[nodes] = setup_s
        return setup_s

    def _cpu(self, way: _Way, node: int) -> _Costs:
        where = f"from node {self._initiator} to node {node}"
        access = self._machine.access(self._initiator, node)
        if access is None:
            raise self._missing(f"bandwidth {where}")
        rate = (
            access.read_bandwidth_bytes_per_s
            if way == "read"
            else access.write_bandwidth_bytes_per_s
        )
        rate = self._required(rate, f"{way} bandwidth {where}")
        costs = [self._cost(f"path {self._initiator}-{node}", rate)]
        if self._engines.lines_in_flight is not None:
            latency_s = self._required(access.read_latency_ns, f"latency {where}") * _NS
            costs.append(
                self._cost("lines", LINE_BYTES * self._engines.lines_in_flight / latency_s)
            )
        return tuple(costs)

    def _accelerator(self, engine: Engine, what: str) -> _Costs:
        """Of flops, or of bytes in the accelerator's memory."""
        if what == "flops":
            if engine == "cpu":
                peak = self._engines.cpu_flops_per_s
                return () if peak is None else (self._cost("cpu", peak),)
            gpu = self._some_gpu()
            peak = self._required(gpu.peak_flops_per_s, f"peak of GPU {gpu.name}")
            return (self._cost(f"compute {gpu.name}", peak),)
        if engine in ("cpu", "nvme"):
            return ()
        gpu = self._some_gpu()
        rate = gpu.memory_bandwidth_bytes_per_s
        if engine == "gpu":
            rate = self._required(rate, f"memory bandwidth of GPU {gpu.name}")
        costs = () if rate is None else (self._cost(f"hbm {gpu.name}", rate),)
        if what == "bytes":
            return costs
        return (self._link("h2d" if engine == "h2d" else "d2h"), *costs)

    def _drive(self, way: _Way) -> _Costs:
        """What is loaded is written into node memory; what is stored is read from it."""
        drives: tuple[Drive, ...] = self._machine.drives
        if not drives:
            raise self._missing("drive")
        drive = drives[0]
        if way == "write":
            rate, what = drive.read_bandwidth_bytes_per_s, "read"
        else:
            rate, what = drive.write_bandwidth_bytes_per_s, "write"
        rate = self._required(rate, f"{what} bandwidth of drive {drive.name}")
        return (self._cost(f"drive {what}", rate),)


def _charge(wanted: dict[int, float], costs: _Costs, amount: float) -> None:
    for resource, seconds in costs:
        wanted[resource] = wanted.get(resource, 0.0) + seconds * amount
