"""Time of GPU work by its roofline: arithmetic against memory traffic."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cxl_offload.renamed import old_names

MOST_GPUS = 64
"""Of one host that a plan is made for."""

PREFILL_EFFICIENCY = 0.52
"""Share of a GPU's dense peak that the matrix products of a large batch reach: 163 of an A100's
312 TFLOP/s (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC
2021, Table 1). That of a GPU of which no more is known."""

TRAINING_SHARES: tuple[tuple[str, float], ...] = (
    # ZeRO-Offload: 40 of 125 TFLOP/s (Ren et al., USENIX ATC 2021, section 6); Megatron-LM: 39 of
    # 130 (Shoeybi et al., 2019, section 1).
    (r"V100", 0.32),
    # FlexGen's calibration of a T4 (cost_model.py), a card of 70 W that its power limit throttles;
    # an L4 has 72 W.
    (r"T4|L4", 0.33),
    # A100: the middle of 0.44, Megatron-LM with 1.7 and 3.6 billion parameters (Narayanan et al.,
    # SC 2021, Table 1), and of 0.59, llm-foundry with 1 to 7 billion and 2048 tokens (MosaicML,
    # scripts/train/benchmarking/README.md, rows without checkpointing).
    (r"A100|A800|A10G?|A30|A40|A6000|RTX A\d+|RTX 30\d0", 0.51),
    # RTX 4090: ZeRO-2 and 3 with offload by LLaMA-Factory, which recomputes activations, Qwen2.5 of
    # 0.5 to 14 billion: 30183 to 1135 tokens/s (llmq, benchmarks/4090x1.md). Geometric mean.
    (r"RTX 40\d0|L40S?|RTX 6000 Ada", 0.77),
    # H100: llm-foundry as above, 1 to 7 billion and 2048 tokens.
    (r"G?H100|G?H200|H800", 0.42),
)
"""Shares of a GPU's dense peak that forward and backward of a training reach, by its name.

Recomputed arithmetic counts, and of attention what a causal mask leaves. What is published are
whole steps, so the shares are a little too low where the rest of a step is long."""

UNKNOWN_TRAINING_SHARE = min(share for _, share in TRAINING_SHARES)
"""Of a GPU without a published one: the lowest."""


def training_share(name: str) -> float | None:
    """Share of its peak that a GPU of this name reaches in training; None where none is known."""
    for pattern, share in TRAINING_SHARES:
        if re.search(rf"(?<![A-Za-z0-9])({pattern})(?![A-Za-z0-9])", name, re.IGNORECASE):
            return share
    return None


def assumed_training_share(name: str) -> float:
    """The same, and the lowest for a GPU whose own is not known."""
    known = training_share(name)
    return UNKNOWN_TRAINING_SHARE if known is None else known


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


SEQUENCE_S = 5e-6
"""Seconds that each running sequence adds to a decode step of vLLM: its scheduling, its sampling
and the way of its token out. Fitted, with ``REQUEST_S``, to 1000 requests of ShareGPT and 1000 of
128 + 4 tokens at once, Qwen3-14B by vLLM 0.11.0 on an A100 and on an H100 (GPUStack's
documentation, Performance Lab)."""

REQUEST_S = 5e-3
"""Seconds of vLLM's server for a request beside the GPU's work: its text into tokens, its way in.
Fitted as ``SEQUENCE_S``: the requests of 128 + 4 tokens leave 3 to 13 ms each."""

_REACHED = (
    (0.33, r"T4|RTX 20\d\d|QUADRO RTX"),
    (0.58, r"A100|A800"),
    (0.33, r"GH200|H20|H100|H200|H800"),
)
"""Shares of the dense peak that large products reach, by GPU.

Turing: FlexGen's own calibration on a T4, which its power limit throttles (experimental/
cost_model.py). A100: Qwen3-14B, 500 requests of 2000 + 100 tokens at once by vLLM 0.11.0
(GPUStack's documentation, Performance Lab), 284.64 tokens/s. Hopper: the same on an H100, 505.51.
Others: ``PREFILL_EFFICIENCY``."""


def arithmetic_share(name: str) -> float | None:
    """Share of the dense peak that large products reach on a GPU of that name; None: not known."""
    for share, names in _REACHED:
        if re.search(rf"(?<![A-Z0-9])(?:{names})(?![A-Z0-9])", name.upper()):
            return share
    return None


@dataclass(frozen=True, slots=True)
class GpuRates:
    """One GPU: the peak of dense half-precision arithmetic, what it reads of its memory, and the
    share of the peak that large products reach, for every executor alike.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    arithmetic_share: float = PREFILL_EFFICIENCY

    @property
    def products_flops_per_s(self) -> float:
        """What large matrix products reach."""
        return self.flops_per_s * self.arithmetic_share


NO_GPU = GpuRates(float("inf"), float("inf"))
"""Stands where a machine has none: CPUs compute, and nothing is charged to a GPU."""


def roofline_seconds(gpu: GpuRates, *, flops: float, nbytes: float) -> float:
    """Seconds of a kernel: the larger of its arithmetic and its memory time.

    Valid for kernels large enough to fill the GPU; what lies between kernels is not in it
    (``LAYER_S``).
    """
    return max(flops / gpu.products_flops_per_s, nbytes / gpu.memory_bytes_per_s)


__getattr__ = old_names(__name__)
