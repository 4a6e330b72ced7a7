"""What a training step with ZeRO-Offload keeps where: bytes a kind on the host, bytes on the GPU.

Stage 2 keeps low-precision parameters on the GPU and the optimizer on the host; stage 1 keeps the
gradients of all micro-batches on the GPU too, and sends their sum once a step; stage 3 with
``offload_param`` keeps the parameters on the host. Several GPUs divide all of it but what each
computes with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from cxl_offload.plan.equations.activation_bytes import held_on_gpu
from cxl_offload.plan.equations.adam_bytes import moment_bytes
from cxl_offload.plan.gpu import GpuRates, roofline_seconds
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.training.gradients import Stage as Stage
from cxl_offload.plan.training.gradients import keeps_a_sum
from cxl_offload.plan.training.zero_offload import SCORE_PRODUCTS, training_flops

MOST_BATCH = 1 << 20
"""Sequences of a step: every divisor is tried, and no training has nearly as many."""

LOW_BYTES = 2
"""Bytes of a parameter or gradient in bf16 or fp16."""

GRADIENT_BUCKET_ELEMENTS = 200_000_000
"""Gradients that wait on the GPU for their copy; the plan sets DeepSpeed's ``reduce_bucket_size``
to it. DeepSpeed keeps two buckets with ``overlap_comm``."""

LAYER_BYTES_PER_ELEMENT = 34
SCORE_BYTES = 5
"""Activations of one layer without recomputation: s*b*h*(34 + 5*a*s/h) bytes in half precision
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, eq. 1). With
checkpointing one layer holds them at a time, the others keep their input. FlashAttention keeps no
scores, so the second term is gone, and one number a row of them is left out (Dao et al.,
FlashAttention, NeurIPS 2022, 3.1)."""

LOGIT_BYTES = 8
"""Logits in half precision, in fp32, and half of their gradient, an element of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A model, the sequences of one step on one GPU, and tokens a sequence.

    With ``flash_attention`` the backward computes the scores again instead of keeping them.
    """

    model: ModelConfig
    batch: int
    tokens: int
    flash_attention: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or self.tokens < 1:
            raise ValueError(f"batch {self.batch}, sequence {self.tokens}: at least 1")
        if self.batch > MOST_BATCH:
            raise ValueError(f"batch {self.batch}: at most {MOST_BATCH} sequences")
        if self.model.quantization is not None:
            raise ValueError(
                f"{self.model.name} is quantised ({self.model.quantization.method}): train a "
                "checkpoint in half precision"
            )
        if self.tokens > self.model.positions:
            raise ValueError(
                f"sequence of {self.tokens} tokens is longer than the {self.model.positions} "
                f"positions of {self.model.name}; shorten it"
            )

    @property
    def attended(self) -> float:
        """Tokens whose scores a query computes, the mean of all queries and layers.

        Attention that keeps its scores computes all of them, those too that its mask drops; the
        kernels of FlashAttention leave those out, and what a window does not see.
        """
        tokens, window, model = self.tokens, self.model.window, self.model
        if not (self.flash_attention and model.generates):
            return float(tokens)
        full = (tokens + 1) / 2
        if not 0 < window < tokens:
            return full
        near = window - window * (window - 1) / (2 * tokens)
        return full + (near - full) * model.windowed_layers / model.layers

    def checkpoint_bytes(self, micro: int) -> int:
        """One tensor a layer, its input, of a micro-batch."""
        return LOW_BYTES * micro * self.tokens * self.model.hidden * self.model.layers

    def flops(self, *, checkpointing: bool) -> tuple[float, float]:
        """Operations of ``(forward, backward)`` of one sequence, scores and logits included."""
        model, tokens = self.model, self.tokens
        heads = model.layers * model.heads * model.head_dim
        return training_flops(
            model.multiplied_parameters,
            tokens,
            checkpointing=checkpointing,
            attention=2.0 * SCORE_PRODUCTS * tokens * self.attended * heads,
            output=2.0 * tokens * model.vocab * model.embed_dim,
            flash_attention=self.flash_attention,
        )

    def passes(self, gpu: GpuRates, share: float, *, micro: int, checkpointing: bool) -> Passes:
        """Seconds of forward and backward of a micro-batch on a GPU.

        A pass reads the weights, and the activations between layers once and writes them; forward
        is one, backward two, and one more where it computes forward again.

        Parameters
        ----------
        share
            Of the GPU's peak that its arithmetic reaches.
        """
        model = self.model
        weights = LOW_BYTES * (model.parameters - model.looked_up_parameters)
        between = 2 * LOW_BYTES * micro * self.tokens * model.hidden * model.layers
        forward, backward = self.flops(checkpointing=checkpointing)
        training, times = replace(gpu, arithmetic_share=share), 3 if checkpointing else 2
        return Passes(
            *(
                roofline_seconds(training, flops=micro * flops, nbytes=each * (weights + between))
                for flops, each in ((forward, 1), (backward, times))
            )
        )


class Passes(NamedTuple):
    """Seconds of a micro-batch on the GPU."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class HostKind:
    """A kind of host tensor: its bytes, and the CPU's traffic on them in one optimizer step.

    ``copied`` kinds are what the GPU's copy engine reads and writes.
    """

    name: str
    bytes: int
    traffic: float
    copied: bool = False


def host_kinds(
    params: int, stage: Stage, accumulation: int = 1, *, state_dtype: str = ""
) -> tuple[HostKind, ...]:
    """Kinds of host tensors, names as DeepSpeed's objects are called in the documentation.

    AdamW in fp32 reads four values a parameter and writes three: 28 bytes; momentum and variance of
    ``state_dtype``, one of ``STATE_TYPES``, are fewer. Then DeepSpeed reads the
    parameters once more and writes them in low precision, 6 bytes, in all stages: to ``staging``,
    from where they return to the GPU in stages 1 and 2, or to ``params``. What is copied to and
    from the GPU stands apart from what the CPU streams. In stage 3 low-precision gradients are
    added up in ``staging``. Source: ``training.zero_offload``; DeepSpeed 0.19, stage_1_and_2.py
    (``step``) and stage3.py (``_reassign_or_swap_out_partitioned_parameters``).
    """
    low, cast = LOW_BYTES * params, float(LOW_BYTES * params)
    moment = moment_bytes(params, state_dtype)
    streamed = [
        HostKind("fp32_master", 4 * params, 12.0 * params),
        HostKind("fp32_grad", 4 * params, 4.0 * params),
        HostKind("exp_avg", moment, 2.0 * moment),
        HostKind("exp_avg_sq", moment, 2.0 * moment),
    ]
    copied = [HostKind("staging", low, 0.0 if stage == 3 else cast, copied=True)]
    if keeps_a_sum(stage, accumulation):
        copied.append(HostKind("grad_accumulation", low, 0.0, copied=True))
    if stage == 3:
        copied.append(HostKind("params", low, cast, copied=True))
    return (*streamed, *copied)


def gpu_bytes(
    job: TrainingJob,
    micro_batch: int,
    stage: Stage,
    *,
    checkpointing: bool = True,
    offloaded: bool = False,
) -> int:
    """What the GPU must hold at the peak of a micro-batch's backward.

    Parameters (stage 3: two layers of them and the embeddings' largest tensor), in stage 1 as many
    bytes of gradients, two gradient buckets, logits, and with checkpointing one checkpoint a layer
    and one layer's activations, else those of all layers. Checkpoints that are ``offloaded`` are on
    the GPU only while they are copied, unless they are too small to leave.
    """
    model = job.model
    parameters = model.parameters
    largest = max(tensor.elements // tensor.count for tensor in model.tensors())
    resident = {
        1: 2 * parameters,  # DeepSpeed 0.19, stage_1_and_2.py: reduced at the last pass only
        2: parameters,
        3: 2 * (parameters // model.layers) + largest,
    }[stage]
    rows = micro_batch * job.tokens
    checkpoints = job.checkpoint_bytes(micro_batch)
    if offloaded:
        checkpoints = held_on_gpu(checkpoints, model.layers)
    layer = LAYER_BYTES_PER_ELEMENT * rows * model.hidden
    if not job.flash_attention:
        layer += SCORE_BYTES * micro_batch * model.heads * job.tokens**2
    logits = LOGIT_BYTES * rows * model.vocab
    buckets = 2 * LOW_BYTES * min(GRADIENT_BUCKET_ELEMENTS, parameters)
    held = checkpoints + max(layer, logits) if checkpointing else layer * model.layers + logits
    return LOW_BYTES * resident + buckets + held


def micro_batches(job: TrainingJob) -> list[int]:
    """Micro-batches that make up the batch in whole steps, ascending."""
    return [size for size in range(1, job.batch + 1) if job.batch % size == 0]
