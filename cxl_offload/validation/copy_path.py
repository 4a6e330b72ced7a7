"""A copy between host memory and a GPU from its first byte on: what it costs to begin with.

Plans move large tensors, whose copies the rates alone decide
(:mod:`cxl_offload.plan.equations.copies`); papers print small copies too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxl_offload.plan.equations.copies import path_bytes_per_s
from cxl_offload.plan.machine_rates import MachineRates


@dataclass(frozen=True, slots=True)
class CopyPath:
    """Host memory to one GPU, pinned, one copy at a time.

    ``tier_setup_s`` is what one copy from a tier costs before its first byte.
    """

    link_bytes_per_s: float
    tier_bytes_per_s: Mapping[str, float]
    tier_setup_s: Mapping[str, float] = field(default_factory=dict)


def copy_seconds(path: CopyPath, shares: Mapping[str, float], nbytes: float) -> float:
    """Seconds of one copy: set-up (the mean over its pages), then bytes at the path's rate.

    Raises
    ------
    KeyError
        A share of a tier with no rate.
    """
    setup = sum(share * path.tier_setup_s.get(tier, 0.0) for tier, share in shares.items())
    rates = [path.tier_bytes_per_s[tier] for tier in shares]
    return setup + nbytes / path_bytes_per_s(path.link_bytes_per_s, rates, list(shares.values()))


def path_of_machine(numbers: MachineRates, tiers: Sequence[str]) -> CopyPath:
    """Copies from the named host tiers to the GPU of a machine file."""
    return CopyPath(
        link_bytes_per_s=numbers.link_bytes_per_s(),
        tier_bytes_per_s={tier: numbers.copy_bytes_per_s(tier) for tier in tiers},
        tier_setup_s={tier: _setup_s(numbers, tier) for tier in tiers},
    )


def _extra_ns(numbers: MachineRates, tier: str) -> list[float | None]:
    """What a copy from every node of a tier costs more than from local DRAM, where it is known."""
    gpu, machine = numbers.gpu(), numbers.machine
    paths = [machine.dma_path(gpu, node) for node in machine.tier(tier).nodes]
    return [path.extra_latency_ns if path else None for path in paths]


def _setup_s(numbers: MachineRates, tier: str) -> float:
    gpu, extra = numbers.gpu(), [each or 0.0 for each in _extra_ns(numbers, tier)]
    base = gpu.link.setup_s or 0.0 if gpu.link else 0.0
    return base + (sum(extra) / len(extra) if extra else 0.0) * 1e-9


def extra_setup_s(numbers: MachineRates, tier: str) -> float | None:
    """What one copy from ``tier`` costs before its first byte, over one from local DRAM.

    None where the machine file does not say (``extra_latency`` in its ``dma_paths``).
    """
    nodes = _extra_ns(numbers, tier)
    extra = [each for each in nodes if each]
    return sum(extra) / len(extra) * 1e-9 if extra and len(extra) == len(nodes) else None
