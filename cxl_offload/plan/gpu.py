"""Time of GPU work by its roofline: arithmetic against memory traffic."""

from __future__ import annotations

from dataclasses import dataclass

MOST_GPUS = 64
"""Of one host that a plan is made for."""

PREFILL_EFFICIENCY = 0.52
"""Share of a GPU's dense peak that the matrix products of a large batch reach: 163 of an A100's
312 TFLOP/s (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC
2021, Table 1). FlexGen's own calibration is 0.33 on a T4, a GPU that its power limit throttles."""

TRAINING_EFFICIENCY = 0.32
"""Share of the peak that forward and backward of ZeRO-Offload reach: 40 of a V100's 125 TFLOP/s
(Ren et al., ZeRO-Offload, USENIX ATC 2021, section 6)."""

MEMORY_SHARE = 0.82
"""Share of its data sheet's memory rate at which a GPU reads weights and KV while it decodes.

One sequence on an A100 of 80 GB (2039 GB/s) with vLLM 0.6.3: 312, 183, 128, 84.3 and 46.3 tokens/s
of Qwen2.5 with 0.5B to 14B in bf16, which read 1.0 to 28 GB a token (Qwen2.5's documentation, Speed
Benchmark). By their seconds over bytes and layers, least squares of the logarithms, it is 0.82, and
115 µs a layer (``LAYER_S``)."""

LAYER_S = 80e-6
"""Seconds of one layer of a decode step beside its bytes and its arithmetic: kernels that wait for
each other, and what the engine does between steps. With ``MEMORY_SHARE`` of an A100's memory rate
the published speeds of one sequence leave 115 µs (vLLM 0.6.3, as above) and 50 µs (LLaMA-2-7B and
LLaMA-3.1-8B by gpt-fast's README, LLaMA-2-7B by the benchmark of LMDeploy 0.2.0); this is the
middle."""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """One GPU: the peak of dense half-precision arithmetic, and what it reads of its memory."""

    flops_per_s: float
    memory_bytes_per_s: float


NO_GPU = GpuRates(float("inf"), float("inf"))
"""Stands where a machine has none: CPUs compute, and nothing is charged to a GPU."""


def roofline_seconds(
    gpu: GpuRates, *, flops: float, nbytes: float, efficiency: float = 1.0
) -> float:
    """Seconds of a kernel: the larger of its arithmetic and its memory time.

    ``efficiency`` is the share of the arithmetic peak that is reached. Valid for kernels large
    enough to fill the GPU; what lies between kernels is not in it (``LAYER_S``).
    """
    return max(flops / (gpu.flops_per_s * efficiency), nbytes / gpu.memory_bytes_per_s)
