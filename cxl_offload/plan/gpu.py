"""Time of GPU work by its roofline: arithmetic against memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_EFFICIENCY = 0.52
"""Share of a GPU's dense peak that the matrix products of a large batch reach: 163 of an A100's
312 TFLOP/s (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC
2021, Table 1). FlexGen's own calibration is 0.33 on a T4, a GPU that its power limit throttles."""

TRAINING_EFFICIENCY = 0.32
"""Share of the peak that forward and backward of ZeRO-Offload reach: 40 of a V100's 125 TFLOP/s
(Ren et al., ZeRO-Offload, USENIX ATC 2021, section 6)."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Peaks of one GPU: dense half-precision arithmetic and memory."""

    flops_per_s: float
    memory_bytes_per_s: float


NO_GPU = GpuRates(float("inf"), float("inf"))
"""Stands where a machine has none: CPUs compute, and nothing is charged to a GPU."""


def roofline_seconds(
    gpu: GpuRates, *, flops: float, nbytes: float, efficiency: float = 1.0
) -> float:
    """Seconds of a kernel: the larger of its arithmetic and its memory time.

    ``efficiency`` is the share of the arithmetic peak that is reached. Valid for kernels large
    enough to fill the GPU; launch overhead is not in it.
    """
    return max(flops / (gpu.flops_per_s * efficiency), nbytes / gpu.memory_bytes_per_s)
