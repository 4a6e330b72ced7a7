"""How long each event would occupy the machine's resources: its demands.

A demand is in seconds: the bytes that an event moves over a resource divided by the resource's
rate. An event alone takes the largest of its demands, because its parts (the granules of a tensor
on several nodes) move at the same time, and as a whole no faster than the slowest of them lets it.
The resources themselves are in :mod:`cxl_offload.sim.machine`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.core import BASE_PAGE_BYTES, LINE_BYTES
from cxl_offload.errors import ConfigError
from cxl_offload.renamed import old_names
from cxl_offload.sim.cache import Cache
from cxl_offload.sim.columns import Group, Kind
from cxl_offload.sim.fabric import Fabric
from cxl_offload.sim.loaded import loaded_latency_ns
from cxl_offload.sim.machine import Costs, Rates, ReadOrWrite
from cxl_offload.topology import Machine
from cxl_offload.units import NS


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStream:
    """CPUs that work through data from one end to the other, with hardware prefetchers ahead.

    Attributes
    ----------
    bytes_per_s
        What all of them together read and write on memory of ``latency_ns``, however fast it is.
    latency_ns
        Of the memory on which they do so.
    cores
        Of them. Each waits for one line at a time that no prefetcher brought.
    span_bytes
        What a prefetcher stays within: the first line of each span is waited for, which on slower
        memory takes longer by the difference of latencies; all other lines are there in time.
    """

    bytes_per_s: float
    latency_ns: float
    cores: int
    span_bytes: int = BASE_PAGE_BYTES

    def __post_init__(self) -> None:
        if not (0 < self.bytes_per_s < float("inf") and 0 <= self.latency_ns < float("inf")):
            raise ConfigError(
                f"CPUs that work through {self.bytes_per_s:g} bytes/s on memory of "
                f"{self.latency_ns:g} ns: give a finite rate above 0, and a latency of 0 or more"
            )
        if min(self.cores, self.span_bytes) < 1:
            raise ConfigError(
                f"{self.cores} cores with prefetchers that stay within {self.span_bytes} bytes: "
                "each is at least 1"
            )

    def seconds(self, nbytes: Floats, latency_ns: Floats) -> Floats:
        """Of all CPUs together.

        Parameters
        ----------
        nbytes
            float64 ``(n, nodes)``: what an event reads and writes on each node.
        latency_ns
            float64 ``(nodes,)``.

        Returns
        -------
        numpy.ndarray
            float64 ``(n,)``.
        """
        longer_ns = (nbytes * (latency_ns - self.latency_ns)).sum(axis=1) / self.span_bytes
        seconds: Floats = nbytes.sum(axis=1) / self.bytes_per_s
        seconds += np.maximum(longer_ns, 0.0) * NS / self.cores
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Rates that machine files do not have; ``None`` charges no time for what they bound.

    Attributes
    ----------
    cpu_flops_per_s
        Arithmetic of the initiator's CPUs; those of other nodes have as much a core. Work on
        offloaded tensors is bound by memory, so it is left out unless given.
    lines_in_flight
        Cache lines that the initiator's CPUs can have under way, all threads together (threads
        times the lines of one). By Little's law they bound bandwidth to
        ``lines_in_flight * 64 B / latency``.
    mixed_lines_in_flight
        The same for work on data that is spread over several nodes, where hardware prefetchers
        lose track (Lebedev et al., Demystifying CXL Memory Bandwidth Expansion, 5.1);
        ``lines_in_flight`` unless given.
    loaded_latency
        Whether latency grows with load (:mod:`cxl_offload.sim.loaded`) instead of staying idle
        until a node is saturated.
    cpu_stream
        How fast the initiator's CPUs work through what they read and write.
    """

    cpu_flops_per_s: float | None = None
    lines_in_flight: float | None = None
    mixed_lines_in_flight: float | None = None
    loaded_latency: bool = False
    cpu_stream: CpuStream | None = None

    def __post_init__(self) -> None:
        for name in ("cpu_flops_per_s", "lines_in_flight", "mixed_lines_in_flight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a finite number above 0, or None")
        if self.lines_in_flight is None and (self.loaded_latency or self.mixed_lines_in_flight):
            raise ConfigError(
                "loaded_latency and mixed_lines_in_flight refine lines_in_flight; give that too"
            )
        if self.loaded_latency and min(self.lines_in_flight or 1, self._mixed_lines or 1) < 1:
            raise ConfigError("loaded_latency needs at least one line in flight")

    @property
    def _mixed_lines(self) -> float | None:
        return self.mixed_lines_in_flight or self.lines_in_flight

    def lines(self, *, mixed: bool) -> float | None:
        """Lines in flight of work on one node, or on several."""
        return self._mixed_lines if mixed else self.lines_in_flight


@dataclass(frozen=True, slots=True)
class Demands:
    """Of all events of one kind.

    Attributes
    ----------
    setup_s
        Set-up seconds, of each.
    resources
        Numbers of the resources that at least one of them needs.
    seconds
        float64 ``(n, resources)``.
    """

    setup_s: float
    resources: tuple[int, ...]
    seconds: Floats


class Resources:
    """Tells the demands of events on a machine; see :class:`cxl_offload.sim.machine.Rates`."""

    def __init__(
        self,
        machine: Machine,
        *,
        initiator: int,
        gpu: str | None,
        engines: Engines,
        fabric: Fabric | None,
        cache: Cache | None,
    ) -> None:
        self.rates = Rates(machine, initiator=initiator, gpu=gpu, fabric=fabric)
        self._engines = engines
        self._cache = cache

    def of(self, group: Group) -> Demands:
        """Set-up time and demands of events of one kind.

        Raises
        ------
        ConfigError
            The machine lacks a number that these events need; names it.
        """
        kind = group.kind
        charged: dict[int, Floats] = {}
        amounts = self._past_cache(group)
        used = _any_of(amounts)
        places: list[tuple[ReadOrWrite, int]] = [("read", node) for node in kind.reads]
        places += [("write", node) for node in kind.writes]
        for at, (way, node) in enumerate(places):
            if used[at]:
                costs = self.rates.host(kind.engine, way, node, cpus=kind.cpus)
                _charge(charged, costs, amounts[:, at])
        if kind.engine == "cpu" and self._engines.lines_in_flight is not None:
            self._charge_lines(charged, kind, amounts)
        if kind.engine == "cpu" and self._engines.cpu_stream is not None:
            self._charge_stream(charged, kind, amounts, self._engines.cpu_stream)
        if used[-1]:
            peak = self._engines.cpu_flops_per_s
            costs = self.rates.operations(kind.engine, cpu_flops_per_s=peak, cpus=kind.cpus)
            _charge(charged, costs, amounts[:, -1])
        if used[-2]:
            _charge(charged, self.rates.accelerator(kind.engine), amounts[:, -2])
            self._charge_bare_link(charged, kind, amounts)
        setup_s = 0.0
        if kind.engine in ("h2d", "d2h"):
            setup_s = self.rates.setup_s((*kind.reads, *kind.writes))
        seconds = np.zeros((len(amounts), len(charged)))
        for column, of_resource in enumerate(charged.values()):
            seconds[:, column] = of_resource
        return Demands(setup_s, tuple(charged), seconds)

    def _past_cache(self, group: Group) -> Floats:
        """Amounts of what reaches memory."""
        kind = group.kind
        if self._cache is None or kind.engine != "cpu":
            return group.amounts
        misses = [
            1.0 - self._cache.hit_share(kind.tensor_kind, node)
            for node in (*kind.reads, *kind.writes)
        ]
        kept: Floats = group.amounts * np.array([*misses, 1.0, 1.0])
        return kept

    def _charge_bare_link(self, charged: dict[int, Floats], kind: Kind, amounts: Floats) -> None:
        """Copies whose host end is no tier's memory still cross the link."""
        if kind.engine == "h2d" or kind.engine == "d2h":
            bare = np.count_nonzero(amounts[:, :-2], axis=1) == 0
            if bare.any():
                _charge(charged, (self.rates.link(kind.engine),), amounts[:, -2] * bare)

    def _charge_lines(self, charged: dict[int, Floats], kind: Kind, amounts: Floats) -> None:
        """Little's law: bytes over 64 are lines, each under way for the latency of its node."""
        nodes, on_node = self._own_work("lines_in_flight", kind, amounts)
        if not nodes:
            return
        idle_ns = self._idle_ns(nodes)
        spread = (on_node > 0).sum(axis=1)
        waited = np.zeros(len(amounts))
        for rows, is_mixed in ((spread == 1, False), (spread > 1, True)):
            lines = self._engines.lines(mixed=is_mixed)
            if rows.any() and lines is not None:
                latency_ns = self._latency_ns(nodes, on_node[rows], idle_ns, lines)
                waited[rows] = (on_node[rows] * latency_ns).sum(axis=1) * NS / (LINE_BYTES * lines)
        number, _ = self.rates.cost("lines", 1.0)
        charged[number] = waited

    def _charge_stream(
        self, charged: dict[int, Floats], kind: Kind, amounts: Floats, stream: CpuStream
    ) -> None:
        """The CPUs' own time with the bytes, wherever these are, and what slower memory adds."""
        nodes, on_node = self._own_work("cpu_stream", kind, amounts)
        if nodes:
            number, _ = self.rates.cost("stream", 1.0)
            charged[number] = stream.seconds(on_node, self._idle_ns(nodes))

    def _own_work(self, what: str, kind: Kind, amounts: Floats) -> tuple[list[int], Floats]:
        """Nodes that the initiator's CPUs work on, and bytes read and written on each."""
        if kind.cpus is not None:
            raise ConfigError(
                f"{what}: rates of the initiator's CPUs, and the trace has work of the CPUs of "
                f"node {kind.cpus}; leave them out"
            )
        nodes = sorted({*kind.reads, *kind.writes})
        on_node = np.zeros((len(amounts), len(nodes)))
        for at, node in enumerate((*kind.reads, *kind.writes)):
            on_node[:, nodes.index(node)] += amounts[:, at]
        used = _any_of(on_node)
        nodes = [node for node, is_used in zip(nodes, used, strict=True) if is_used]
        return nodes, on_node[:, np.array(used, dtype=np.bool_)]

    def _idle_ns(self, nodes: list[int]) -> Floats:
        return np.array([self.rates.latency_ns(node) for node in nodes], dtype=np.float64)

    def _latency_ns(
        self, nodes: list[int], on_node: Floats, idle_ns: Floats, lines: float
    ) -> Floats:
        if not self._engines.loaded_latency:
            return idle_ns
        shares = on_node / on_node.sum(axis=1, keepdims=True)
        kinds, which = np.unique(np.round(shares, 6), axis=0, return_inverse=True)
        latency_ns = loaded_latency_ns(
            kinds,
            idle_latency_ns=idle_ns,
            bandwidth_bytes_per_s=[self.rates.read_bytes_per_s(node) for node in nodes],
            lines_in_flight=lines,
        )
        return np.asarray(latency_ns[which.reshape(-1)], dtype=np.float64)


def _any_of(amounts: Floats) -> list[bool]:
    """Column by column, whether any row has something there."""
    return [bool(amounts[:, at].any()) for at in range(amounts.shape[1])]


def _charge(charged: dict[int, Floats], costs: Costs, amounts: Floats) -> None:
    for resource, seconds in costs:
        before = charged.get(resource)
        charged[resource] = seconds * amounts if before is None else before + seconds * amounts


__getattr__ = old_names(__name__)
