"""How often gradients cross the link in a step, as DeepSpeed copies them.

With the optimizer on the host, the gradients of a micro-batch are added up on the GPU: what the
micro-batches before left in host memory comes back in low precision, and the new sum leaves again.
The last micro-batch sends the sum once more, in fp32, to where the optimizer reads it. The copies
of a micro-batch follow each other on one stream.

- Stage 1 keeps the sum on the GPU, and sends it once.
- Stage 2 does so with one micro-batch. With several the first has nothing to fetch.
- Stage 3 copies every partition out and in again in every micro-batch, the first included.

Source: DeepSpeed 0.19.8, stage_1_and_2.py (``copy_grads_in_partition``,
``async_accumulate_grad_in_cpu_via_gpu``, ``async_inplace_copy_grad_to_fp32_buffer_from_gpu``) and
stage3.py (``partition_grads``, ``_offload_grad_partition_at_boundary``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class GradientCopies:
    """Copies of all gradients in each of ``passes`` micro-batches that copy alike.

    Attributes
    ----------
    out, back
        Low-precision copies to the host, and to the GPU.
    final
        Copies in fp32, to the host.
    back_first
        Whether the copy to the GPU begins: then it shares its direction of the link with the
        parameters that stage 3 fetches, and the copies after it wait.
    """

    passes: int
    out: int
    back: int
    final: int
    back_first: bool = False

    @property
    def sends(self) -> bool:
        """Whether gradients are copied at all."""
        return bool(self.out or self.back or self.final)


def gradient_copies(stage: Stage, accumulation: int) -> tuple[GradientCopies, ...]:
    """What the micro-batches of a step copy; those that copy nothing are left out."""
    if stage == 1 or (stage == 2 and accumulation == 1):
        return (GradientCopies(1, out=0, back=0, final=1),)
    first = GradientCopies(1, out=1, back=0 if stage == 2 else 1, final=0)
    later = GradientCopies(accumulation - 2, out=1, back=1, final=0, back_first=True)
    last = GradientCopies(1, out=1, back=1, final=1, back_first=accumulation > 1)
    copies = (first, later, last) if accumulation > 1 else (last,)
    return tuple(each for each in copies if each.passes > 0)


def keeps_a_sum(stage: Stage, accumulation: int) -> bool:
    """Whether stage 2 holds a low-precision sum in host memory, beside its staging buffer."""
    return stage == 2 and accumulation > 1
