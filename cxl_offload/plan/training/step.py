"""One step of a training, before anything of it has a place."""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.plan.equations.activation_bytes import ACTIVATIONS
from cxl_offload.plan.training.drive import BUFFERS, IN_MEMORY, DriveSeconds
from cxl_offload.plan.training.gradients import GradientCopies, gradient_copies
from cxl_offload.plan.training.job import HostKind, Stage

FP32_OVER_LOW = 2
"""Bytes of a gradient in fp32 over those in low precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """What does not depend on placement: times of one micro-batch, and how many there are.

    ``cpu_bytes_per_s`` is what the optimizer draws from local memory. Kinds are what one host
    holds for all its GPUs. ``between_s`` are seconds in which GPUs send each other gradients of a
    micro-batch, or all parameters, which takes as long; 0 for one GPU. ``low_bytes`` are those of
    gradients of a host's GPUs, and of as many parameters; ``drive`` is what a drive takes. ``edge``
    is the share of a backward that one layer is: the first has no gradients to copy yet, and those
    of the last are copied when all is computed.
    """

    kinds: tuple[HostKind, ...]
    stage: Stage
    forward_s: float
    backward_s: float
    accumulation: int
    cpu_bytes_per_s: float
    between_s: float = 0.0
    drive: DriveSeconds = IN_MEMORY
    edge: float = 0.0

    @property
    def traffic(self) -> float:
        """Bytes the optimizer moves."""
        return sum(kind.traffic for kind in self.kinds)

    @property
    def activation_bytes(self) -> int:
        """Checkpoints that leave in every forward and come back in its backward; 0: they stay."""
        return sum(kind.bytes for kind in self.kinds if kind.name == ACTIVATIONS)

    @property
    def copies(self) -> tuple[GradientCopies, ...]:
        """How gradients cross the link; stage 3 fetches parameters in all these passes too.

        Passes that copy no gradients are among them only where checkpoints cross the link.
        """
        copies = gradient_copies(self.stage, self.accumulation)
        others = self.accumulation - sum(each.passes for each in copies)
        if not (self.activation_bytes and others):
            return copies
        return (GradientCopies(others, out=0, back=0, final=0), *copies)

    @property
    def forward_bytes(self) -> dict[str, float]:
        """Of every kind, what copies read and write in host memory during a forward."""
        moved = {"params": float(self.low_bytes)} if self.stage == 3 else {}
        return moved | (
            {ACTIVATIONS: float(self.activation_bytes)} if self.activation_bytes else {}
        )

    def backward_bytes(self, each: GradientCopies) -> dict[str, float]:
        """The same during a backward that copies gradients as ``each`` says."""
        moved, low = self.forward_bytes, float(self.low_bytes)
        for kind, times in (
            (self.sum_kind, each.out + each.back),
            (self.final_kind, FP32_OVER_LOW * each.final),
        ):
            moved[kind] = moved.get(kind, 0.0) + times * low
        return moved

    @property
    def final_kind(self) -> str:
        """The kind that fp32 gradients are copied to."""
        names = {kind.name for kind in self.kinds}
        return "fp32_grad" if "fp32_grad" in names else BUFFERS

    @property
    def sum_kind(self) -> str:
        """The kind that holds the sum of gradients between micro-batches."""
        names = {kind.name for kind in self.kinds}
        return "grad_accumulation" if "grad_accumulation" in names else "staging"

    @property
    def drive_s(self) -> float:
        """Seconds in which nothing but the drive works."""
        return self.drive.optimizer + self.drive.back

    @property
    def low_bytes(self) -> int:
        """Low-precision gradients, and as many bytes of parameters."""
        return next(kind.bytes for kind in self.kinds if kind.name == "staging")
