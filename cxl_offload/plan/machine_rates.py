"""Numbers of a machine for the equations, and what had to be assumed to get them.

A number that a machine file lacks is derived by a stated rule or taken as not binding, and a
sentence about it is kept in ``notes``, which the caller shows: nothing is filled in silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cxl_offload.plan.gpu import MEMORY_SHARE, PREFILL_EFFICIENCY, GpuRates, arithmetic_share
from cxl_offload.plan.gpu_kinds import completed, how_to_give_peaks
from cxl_offload.plan.what_if import GPUS_LEFT_OUT
from cxl_offload.topology import Access, Gpu, Machine

UNBOUND = float("inf")

ASSUMED_LOCAL_BYTES_PER_S = 307.2e9
ASSUMED_REMOTE_SHARE = 0.46
ASSUMED_CXL_BYTES_PER_S = 38.4e9
"""Rates of CPU reads where none is printed, each near the median of the shipped machine files that
have one: of local DRAM, of the other socket's DRAM as a share of that, and of CXL memory."""

ASSUMED_BYTES_PER_S_A_CORE = 14e9
"""The most that is assumed of one core: what one drew (docs/attention.md, measured)."""


def core_bytes_per_s(machine: Machine) -> float:
    """What one core of the initiator draws: of its own memory where the threads that saturate it
    are known, as after a profile; else assumed.
    """
    local = machine.access(machine.initiator, machine.initiator)
    if local is None or not local.read_saturation_threads:
        return ASSUMED_BYTES_PER_S_A_CORE
    rate = local.read_bandwidth_bytes_per_s
    return rate / local.read_saturation_threads if rate else ASSUMED_BYTES_PER_S_A_CORE


@dataclass(slots=True)
class MachineRates:
    """Reads one machine, seen from its initiator; ``notes`` grows with every assumption.

    Rates are of a whole tier, or of some ``nodes`` of it.
    """

    machine: Machine
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keeps a sentence once."""
        if text not in self.notes:
            self.notes.append(text)

    def _accesses(self, tier: str, nodes: Sequence[int] | None) -> list[Access]:
        nodes = self.machine.tier(tier).nodes if nodes is None else nodes
        if not nodes:
            raise ValueError(f"machine {self.machine.name}: tier {tier} has no memory of its own")
        found = [self.machine.access(self.machine.initiator, node) for node in nodes]
        return [
            access or Access(self.machine.initiator, node)
            for access, node in zip(found, nodes, strict=True)
        ]

    def read_bytes_per_s(self, tier: str, nodes: Sequence[int] | None = None) -> float:
        """Saturated read rate of the initiator's CPUs on a tier, the sum over its nodes."""
        rates = [access.read_bandwidth_bytes_per_s for access in self._accesses(tier, nodes)]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            self.note(
                f"{self.machine.name}: no read bandwidth of {tier} is known; it is "
                "taken to bind nothing"
            )
            return UNBOUND
        return sum(known)

    def planned_read_bytes_per_s(self, tier: str, nodes: Sequence[int]) -> float:
        """The same for plans, which assume what is not printed: CPUs that wait for no memory would
        be given all work.
        """
        rates = [access.read_bandwidth_bytes_per_s for access in self._accesses(tier, nodes)]
        known = [rate for rate in rates if rate is not None]
        if len(known) == len(rates):
            return sum(known)
        each = ASSUMED_CXL_BYTES_PER_S
        if tier in ("ldram", "rdram", "hbm"):
            local = self.machine.access(self.machine.initiator, self.machine.initiator)
            own = None if local is None else local.read_bandwidth_bytes_per_s
            each = own or ASSUMED_LOCAL_BYTES_PER_S
            each *= ASSUMED_REMOTE_SHARE if tier == "rdram" else 1.0
        each = min(each, max(1, self.cores()) * core_bytes_per_s(self.machine))
        self.note(
            f"{self.machine.name}: no read bandwidth of {tier} is known: {each / 1e9:.4g} GB/s a "
            "node assumed; cxl-offload profile measures it"
        )
        return sum(known) + each * (len(rates) - len(known))

    def local_bytes_per_s(self) -> float:
        """What the initiator's CPUs read of their own node, printed or assumed as for plans."""
        own = self.machine.initiator
        tier = self.machine.tier_of(own)
        return self.planned_read_bytes_per_s("ldram" if tier is None else tier.name, [own])

    def latency_ns(self, tier: str, nodes: Sequence[int] | None = None) -> float | None:
        """Idle read latency of a tier, the mean over its nodes; None where nothing gives it.

        A node without a printed latency gets one by its kernel distance, on the line through the
        nearest and the farthest node that have one (CXL looks like a two-hop NUMA node: Wang et
        al., Performance Characterization of CXL Memory, III).
        """
        accesses = self._accesses(tier, nodes)
        latencies = [self._node_latency_ns(tier, access) for access in accesses]
        known = [latency for latency in latencies if latency is not None]
        return sum(known) / len(known) if len(known) == len(latencies) else None

    def _node_latency_ns(self, tier: str, access: Access) -> float | None:
        if access.read_latency_ns is not None:
            return access.read_latency_ns
        distance = self.machine.distance(access.initiator, access.target)
        points = sorted(
            (hops, other.read_latency_ns)
            for other in self.machine.accesses
            if other.initiator == access.initiator and other.read_latency_ns is not None
            if (hops := self.machine.distance(other.initiator, other.target)) is not None
        )
        if distance is None or len(points) < 2 or points[0][0] == points[-1][0]:
            return None
        (near, low), (far, high) = points[0], points[-1]
        latency = low + (high - low) * (distance - near) / (far - near)
        self.note(
            f"{self.machine.name} has no latency of {tier}; estimated {latency:.4g} ns, since its "
            f"distance {distance} lies between those of {low:.4g} and {high:.4g} ns"
        )
        return latency

    def latencies_ns(self, tiers: Sequence[str]) -> tuple[float, ...]:
        """Latencies of several tiers; all equal (with a note) where one of them is not known."""
        found = [self.latency_ns(tier) for tier in tiers]
        known = [latency for latency in found if latency is not None]
        if len(known) == len(found):
            return tuple(known)
        names = dict.fromkeys(tiers)
        if len(names) > 1:
            self.note(f"{self.machine.name} lacks latencies of {', '.join(names)}; taken as equal")
        return (known[0] if known else 1.0,) * len(found)

    @property
    def _leaves_gpus_out(self) -> bool:
        return not self.machine.gpus and GPUS_LEFT_OUT in self.machine.notes

    def gpu(self) -> Gpu:
        """The machine's first GPU; what it lacks is assumed by its kind, where that is known."""
        if self._leaves_gpus_out:
            raise ValueError(
                f"machine {self.machine.name}: {GPUS_LEFT_OUT}; leave that out, or name a "
                "GPU (--gpu h100)"
            )
        if not self.machine.gpus:
            raise ValueError(
                f"machine {self.machine.name} has no GPU, or none is asked for; name one that has, "
                "or give it one on paper (--gpu h100)"
            )
        gpu, assumed = completed(self.machine.gpus[0])
        if assumed:
            self.note(assumed)
        return gpu

    def why_no_gpu(self) -> str | None:
        """Why nothing can be planned for a GPU; None: it can."""
        try:
            self.gpu_rates()
            if self.gpu().memory_node == self.machine.initiator:
                return (
                    f"machine {self.machine.name}: GPU {self.gpu().name} and the CPUs share one "
                    "memory, and plans for a GPU count on two; give it another GPU on paper "
                    "(--gpu h100)"
                )
            self.link_bytes_per_s()
        except ValueError as error:
            return str(error)
        if self.gpu().memory_bytes is None:
            return f"machine {self.machine.name}: GPU {self.gpu().name} has no memory size"
        return None

    def why_cpus_compute(self) -> str | None:
        """The same for plans that do without a GPU, where none is no fault; None: one computes."""
        if self.machine.gpus:
            return self.why_no_gpu()
        if self._leaves_gpus_out:
            return GPUS_LEFT_OUT
        return f"{self.machine.name} has no GPU; --gpu h100 plans as if it had one"

    def gpu_rates(self) -> GpuRates:
        """Peak of that GPU, and what it reads of its memory while it decodes."""
        gpu = self.gpu()
        if gpu.peak_flops_per_s is None or gpu.memory_bandwidth_bytes_per_s is None:
            raise ValueError(
                f"machine {self.machine.name}: GPU {gpu.name} has no peak rates"
                f"{how_to_give_peaks(gpu)}"
            )
        share = arithmetic_share(f"{gpu.name} {gpu.model}")
        memory = MEMORY_SHARE * gpu.memory_bandwidth_bytes_per_s
        return GpuRates(gpu.peak_flops_per_s, memory, share or PREFILL_EFFICIENCY)

    def link_bytes_per_s(self) -> float:
        """What a large pinned host-to-device copy reaches on the link."""
        gpu = self.gpu()
        rate = gpu.link.h2d_bandwidth_bytes_per_s if gpu.link else None
        if rate is None:
            raise ValueError(f"machine {self.machine.name}: link of GPU {gpu.name} has no rate")
        peak = gpu.link.peak_bandwidth_bytes_per_s if gpu.link else None
        if rate == peak and not any(path.gpu == gpu.name for path in self.machine.dma_paths):
            self.note(
                f"copies to GPU {gpu.name} assumed to reach the signalling rate of its link, "
                f"{rate / 1e9:.4g} GB/s; cxl-offload profile measures them"
            )
        return rate

    def copy_bytes_per_s(self, tier: str, nodes: Sequence[int] | None = None) -> float:
        """What a tier delivers to the GPU's copy engine, apart from the link.

        The printed copy rate of its nodes; where none is printed, what CPUs read there bounds it,
        and where that is not known either, nothing does.
        """
        gpu = self.gpu()
        nodes = self.machine.tier(tier).nodes if nodes is None else nodes
        copies = [self.machine.dma_bandwidth(gpu, node) for node in nodes]
        known = [rate for rate in copies if rate is not None]
        if nodes and len(known) == len(copies):
            return sum(known)
        bound = self.read_bytes_per_s(tier, nodes)
        if bound < self.link_bytes_per_s():
            self.note(f"{self.machine.name}: no copy rate of {tier} is known; CPU reads bound it")
        return bound

    def other_links(self) -> tuple[float, ...]:
        """Rates of the links of all GPUs but the first; that of the first where one has none."""
        first = self.link_bytes_per_s()
        return tuple(
            (gpu.link.h2d_bandwidth_bytes_per_s if gpu.link else None) or first
            for gpu in self.machine.gpus[1:]
        )

    def other_copies(self, tier: str, node: int) -> tuple[float, ...]:
        """What a node delivers to all GPUs but the first, apart from their links.

        The printed copy rate; else what the CPUs of that GPU's socket read there, and where
        neither is known, what the first GPU gets.
        """
        first = self.copy_bytes_per_s(tier, [node])
        return tuple(
            self.machine.dma_bandwidth(gpu, node) or self._read_from(gpu.node, node) or first
            for gpu in self.machine.gpus[1:]
        )

    def given_bytes_per_s(self, node: int) -> float:
        """The most that the CPUs of a socket with a GPU are known to read of a node."""
        return max((self._read_from(gpu.node, node) for gpu in self.machine.gpus), default=0.0)

    def _read_from(self, initiator: int | None, node: int) -> float:
        """0 where it is not known."""
        access = None if initiator is None else self.machine.access(initiator, node)
        return 0.0 if access is None else access.read_bandwidth_bytes_per_s or 0.0

    def cores(self) -> int:
        """Cores of the initiator."""
        return len(self.machine.node(self.machine.initiator).cpus)
