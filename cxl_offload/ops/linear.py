"""Linear layers of half-precision weights on the CPU, multiplied in single precision.

Few CPUs multiply matrices of half precision, and PyTorch is then several times slower than in
single precision. Here weights become single precision a few rows at a time, in a buffer that stays
in the cache, and products are rounded to half precision once, at the end.
"""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["SinglePrecisionLinear"]

BUFFER_ELEMENTS = 2**19

FEW_ROWS = 7
"""Up to so many, reading the weights takes longest and PyTorch's own product is faster: measured in
decoding on two cores with AVX-512 and no half-precision arithmetic, 1.5 times as fast for 4 rows,
as fast for 8, and 0.7 times for 16."""


class SinglePrecisionLinear:
    """``torch.nn.functional.linear`` for float16 on the CPU; one caller at a time."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``torch.nn.functional.linear``.

        Parameters
        ----------
        inputs
            ``(..., width)``. Of another type than float16, not on the CPU, or of few rows: torch
            computes it.
        weight, bias
            ``(outputs, width)`` and ``(outputs,)``.

        Returns
        -------
        torch.Tensor
            ``(..., outputs)``, of the inputs' type.
        """
        outputs, width = weight.shape
        on_cpu = inputs.dtype is torch.float16 and inputs.device.type == "cpu"
        if not on_cpu or inputs.numel() <= FEW_ROWS * width:
            return functional.linear(inputs, weight, bias)
        rows = inputs.float().reshape(-1, width)
        result = torch.empty(rows.shape[0], outputs, dtype=torch.float16)
        parts = max(1, -(-weight.numel() // BUFFER_ELEMENTS))
        step = max(1, -(-outputs // parts))
        for start in range(0, outputs, step):
            part = slice(start, min(start + step, outputs))
            single = self._single(weight[part])
            if bias is None:
                product = torch.mm(rows, single.t())
            else:
                product = torch.addmm(bias[part].float(), rows, single.t())
            result[:, part] = product
        return result.view(*inputs.shape[:-1], outputs)

    def _single(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy in the buffer, which the next call overwrites."""
        if self._buffer.numel() < weight.numel():
            self._buffer = torch.empty(weight.numel())
        return self._buffer[: weight.numel()].view(weight.shape).copy_(weight)
