"""The terms of FlexGen's step: weights over the link, KV stores, CPU attention, the drive.

Each is charged to the tiers that the pages lie on; ``flexgen.model`` composes them into phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.equations.footprint import ElementBytes, LlmShape, weight_bytes_total
from cxl_offload.plan.equations.interleave import bandwidth_bound, mean_latency_ns
from cxl_offload.plan.gpu import GpuRates

__all__ = [
    "CPU_ATTENTION_FLOPS_PER_CORE",
    "HIDDEN_STORE_BYTES_PER_S",
    "KV_DRIVE_STORE_BYTES_PER_S",
    "KV_STORE_BYTES_PER_S",
    "FlexGenMachine",
    "HostTier",
    "Placement",
    "cpu_attention_seconds",
    "drive_seconds",
    "kv_store_seconds",
    "of_host_part",
    "staged_shares",
    "weights_link_seconds",
]

CPU_ATTENTION_FLOPS_PER_CORE = 0.0123e12 / 16
"""Arithmetic rate of FlexGen's CPU attention on one core.

FlexGen's calibration, 12.3 GFLOP/s on its T4 machine (experimental/cost_model.py, cpu_flops), a
Google n1-highmem-32 (208 GB): 16 cores.
"""

KV_STORE_BYTES_PER_S = 0.97 * 2**30
"""Rate at which FlexGen stores the KV of a prefill to local DRAM: GPU, relay buffer, then a CPU
copy into pageable memory (experimental/cost_model.py, gtoc_bdw_cache)."""

KV_DRIVE_STORE_BYTES_PER_S = 0.746 * 2**30
"""Rate at which FlexGen moves stored KV on to a mapped file (experimental/cost_model.py,
ctod_bdw_cache_p); a slower drive bounds it further."""

HIDDEN_STORE_BYTES_PER_S = 4.82 * 2**30
"""Rate of hidden states from GPU to host (experimental/cost_model.py, gtoc_bdw_hidden)."""

WORKSPACE_BYTES_PER_ELEMENT = 8
"""CPU attention copies each K and V element into an fp32 workspace and reads it: 4 B + 4 B
(pytorch_backend.py, init_cpu_workspace)."""


@dataclass(frozen=True, slots=True)
class HostTier:
    """What one host tier offers to FlexGen; ``dma_bytes_per_s`` is its rate towards the GPU."""

    name: str
    read_bytes_per_s: float
    latency_ns: float
    dma_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class FlexGenMachine:
    """Host tiers, fastest first, the GPU with its link, cores for attention, and a drive.

    ``local_latency_ns`` is that of local DRAM, which FlexGen's calibrated rates refer to.

    Writes to a drive of unknown write rate run at its read rate."""

    tiers: tuple[HostTier, ...]
    local_latency_ns: float
    link_bytes_per_s: float
    gpu: GpuRates
    cores: int
    drive_read_bytes_per_s: float | None = None
    drive_write_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a batch lives.

    ``host_shares`` (one a tier of the machine) and ``drive_share`` hold for weights that are not
    on the GPU and for KV that is not; they sum to one.
    """

    batch: int
    host_shares: tuple[float, ...]
    drive_share: float = 0.0
    weights_gpu_fraction: float = 0.0
    kv_gpu_fraction: float = 0.0
    activations_gpu_fraction: float = 0.0
    gpu_batch: int | None = None


def of_host_part(shares: Sequence[float]) -> tuple[float, ...]:
    """Host shares as fractions of the host part."""
    total = sum(shares)
    return tuple(share / total for share in shares)


def staged_shares(place: Placement) -> tuple[float, ...]:
    """Shares of the tiers in what crosses the host: the first one stages what is on the drive."""
    first, *others = place.host_shares
    return (first + place.drive_share, *others)


def weights_link_seconds(
    machine: FlexGenMachine, llm: LlmShape, sizes: ElementBytes, place: Placement
) -> float:
    """Seconds to bring all weights that are not on the GPU over the link once.

    ``bytes / min(link, DMA_i / f_i)``; drive weights cross the link from the first tier, which
    stages them. Source: FlexGen cost model (ctog), copy law (``copies``).
    """
    nbytes = weight_bytes_total(llm, sizes) * (1 - place.weights_gpu_fraction)
    rate = bandwidth_bound([tier.dma_bytes_per_s for tier in machine.tiers], staged_shares(place))
    return nbytes / min(rate, machine.link_bytes_per_s)


def drive_seconds(nbytes: float, bytes_per_s: float | None) -> float:
    """Seconds of ``nbytes`` to or from the drive.

    Raises
    ------
    ValueError
        Bytes on a drive whose rate is not known.
    """
    if nbytes == 0:
        return 0.0
    if bytes_per_s is None:
        raise ValueError("bytes on nvme, but neither the machine nor the inputs give its rate")
    return nbytes / bytes_per_s


def cpu_attention_seconds(
    machine: FlexGenMachine,
    shares: Sequence[float],
    *,
    flops: float,
    kv_bytes: float,
    kv_elements: float,
) -> float:
    """Seconds of CPU attention over KV spread over the tiers by ``shares``.

    The larger of arithmetic (``cores`` cores at FlexGen's rate) and memory: KV is read from its
    tiers, ``max(f_i / B_i)`` a byte, then the fp32 workspace on the first tier is written and
    read, one after the other.

    Source: FlexGen cost model (cpu_flops) and pytorch_backend.py. Valid for torch's unfused CPU
    attention, which is far from the memory's rate; on a machine of few tiers and many cores the
    memory term takes over.
    """
    arithmetic = flops / (machine.cores * CPU_ATTENTION_FLOPS_PER_CORE)
    read = kv_bytes / bandwidth_bound([tier.read_bytes_per_s for tier in machine.tiers], shares)
    workspace = kv_elements * WORKSPACE_BYTES_PER_ELEMENT / machine.tiers[0].read_bytes_per_s
    return max(arithmetic, read + workspace)


def kv_store_seconds(machine: FlexGenMachine, shares: Sequence[float], nbytes: float) -> float:
    """Seconds to store the KV of a prefill to the host.

    The copy into pageable memory is one closed loop of few lines in flight, so its rate,
    ``KV_STORE_BYTES_PER_S`` on local DRAM, falls with the mean latency of the tiers it writes, by
    ``L_local / sum(f_i * L_i)``.

    Source: FlexGen cost model (gtoc_bdw_cache) and Little's law; that prefill follows latency is
    Wang et al., Performance Characterization of CXL Memory, LIO 2.
    """
    latencies = [tier.latency_ns for tier in machine.tiers]
    slower = mean_latency_ns(latencies, shares) / machine.local_latency_ns
    return nbytes * slower / KV_STORE_BYTES_PER_S
