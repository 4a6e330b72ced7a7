"""Whether a gradient is still what a parameter was updated with."""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef

from cxl_offload.ops.view import local_tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class UsedGradient:
    """A gradient that a parameter was updated with, to be known again.

    Autograd counts what is written through the gradient. What goes around it (``grad.data``,
    ``grad.numpy()``) is seen in a few of its numbers.
    """

    __slots__ = ("_grad", "_numbers", "_version")

    LOOKED_AT = 64

    def __init__(self, grad: torch.Tensor) -> None:
        self._grad, self._version = TensorWeakRef(grad), grad._version
        self._numbers = self._some_of(grad).clone()

    def _some_of(self, grad: torch.Tensor) -> torch.Tensor:
        """The bits of so many numbers, from the first to the last."""
        local = local_tensor(grad.detach())
        if local.layout is not torch.strided or local.itemsize not in _BITS:
            return torch.empty(0)  # the update refuses it
        flat = local.reshape(-1)
        return flat[:: max(1, flat.numel() // self.LOOKED_AT)].view(_BITS[flat.itemsize])

    def is_still(self, grad: torch.Tensor | None) -> bool:
        """Whether it is the same gradient, with the same numbers."""
        if grad is None or self._grad() is not grad:
            return False
        if is_alone(grad) and grad._version != self._version:
            return False
        return torch.equal(self._numbers, self._some_of(grad))


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether it is all of its memory: pieces of a flat buffer are counted as written together."""
    local = local_tensor(tensor.detach())
    if local.layout is not torch.strided:
        return True
    return bool(local.untyped_storage().nbytes() == local.numel() * local.itemsize)
