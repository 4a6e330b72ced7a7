"""A training step of ZeRO-Offload: what the host needs, what is exposed, what CXL changes.

Forward and backward run on the GPU; gradients leave during backward, the optimizer runs on the
CPU over fp32 parameters, gradients, momentum and variance, and updated parameters return before
the next forward. Source: Ren et al., ZeRO-Offload (USENIX ATC 2021), section 4; Wang et al.,
Performance Characterization of CXL Memory, IV-A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.plan.equations.interleave import bandwidth_bound, mean_latency_ns
from cxl_offload.renamed import old_names

PREFETCH_SPAN_BYTES = BASE_PAGE_BYTES
"""Hardware prefetchers do not cross a 4 KiB page (Wang et al., Hitchhiker's Guide, Observation
12): the first line of each is a demand miss."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Times of the phases of one step, in seconds.

    ``gradient_transfer_s`` and ``parameter_transfer_s`` are whole transfers, overlapped or not.
    """

    forward_s: float
    backward_s: float
    gradient_transfer_s: float
    parameter_transfer_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step taken apart; ``exposed_transfer_s`` is what no computation hides of transfers."""

    step_s: float
    exposed_transfer_s: float
    optimizer_share: float


def step_times(inputs: StepInputs) -> StepTimes:
    """One step: forward + backward + exposed transfers + optimizer.

    Gradients cross the link during backward, so only what outlasts it is exposed; parameters
    return after the optimizer, all of it exposed. Valid without DeepSpeed's delayed parameter
    update. Source: Wang et al., Performance Characterization of CXL Memory, IV-A.
    """
    gradients = max(0.0, inputs.gradient_transfer_s - inputs.backward_s)
    exposed = gradients + inputs.parameter_transfer_s
    step = inputs.forward_s + inputs.backward_s + exposed + inputs.optimizer_s
    return StepTimes(step, exposed, inputs.optimizer_s / step if step > 0 else 0.0)


SCORE_PRODUCTS = 2
"""Products of matrices that attention makes in the forward: scores, and their sum of values. The
backward makes twice as many."""

FLASH_BACKWARD_PRODUCTS = 5
"""Those of the backward of FlashAttention, which computes the scores once more (Dao,
FlashAttention-2, ICLR 2024, 3.1)."""


def training_flops(
    params: float,
    tokens: float,
    *,
    checkpointing: bool = True,
    attention: float = 0.0,
    output: float = 0.0,
    flash_attention: bool = False,
) -> tuple[float, float]:
    """Arithmetic of ``(forward, backward)``: 2 and 4 operations a parameter and token.

    Parameters
    ----------
    checkpointing
        Whether the backward computes the forward again, but for the last layer.
    attention
        Operations of scores and values in the forward, in which no parameter takes part. Without
        them it is below 5 % at sequence lengths up to the model width.
    output
        Operations of the output layer, a part of those of the parameters.
    flash_attention
        Whether the backward computes the scores again.

    Source: Kaplan et al., Scaling Laws for Neural Language Models, 2.1; Ren et al., ZeRO-Offload,
    section 6; Korthikanti et al., Reducing Activation Recomputation, appendix A.
    """
    products = 2.0 * params * tokens
    forward = products + attention
    again = FLASH_BACKWARD_PRODUCTS / SCORE_PRODUCTS if flash_attention else 2.0
    backward = 2.0 * products + again * attention
    return forward, backward + (forward - output if checkpointing else 0.0)


def optimizer_seconds(
    nbytes: float,
    *,
    cpu_bytes_per_s: float,
    cores: int,
    bandwidth_bytes_per_s: Sequence[float],
    latency_ns: Sequence[float],
    local_latency_ns: float,
    shares: Sequence[float],
) -> float:
    """Seconds of an optimizer that streams ``nbytes`` of state spread over tiers.

    Two bounds, the larger counts:

    - the CPU at its own rate on local DRAM (``cpu_bytes_per_s``), plus what slower tiers
      expose: prefetching hides latency inside a 4 KiB page, and the first line of each page pays
      the extra latency ``sum(f_i * L_i) - L_local``, on ``cores`` cores at once;
    - the tiers, ``max(f_i / B_i)`` a byte.

    Valid for one pass over page-interleaved state with several streams a core in 4 KiB pages;
    with huge pages the prefetchers still stop at 4 KiB. Source: bandwidth bound (``interleave``)
    and Wang et al., Hitchhiker's Guide, Observation 12; measured on one machine, 2-18 % slower
    with CXL in the interleave set (Wang et al., Performance Characterization, IV-A).
    """
    extra_ns = mean_latency_ns(latency_ns, shares) - local_latency_ns
    exposed_s = nbytes / PREFETCH_SPAN_BYTES * max(0.0, extra_ns) * 1e-9 / cores
    on_cpu = nbytes / cpu_bytes_per_s + exposed_s
    return max(on_cpu, nbytes / bandwidth_bound(bandwidth_bytes_per_s, shares))


__getattr__ = old_names(__name__)
