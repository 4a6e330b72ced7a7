"""FlexGen's linear layers where the CPU computes them: half-precision weights, single precision.

Few CPUs multiply matrices of half precision, and PyTorch is then several times slower than in
single precision. Here weights become single precision a few rows at a time, in a buffer that stays
in the cache, and products are rounded to half precision once, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cxl_offload.integrations.flexgen.request import FlexGenRun

__all__ = ["SinglePrecisionLinear", "functional_of"]

BUFFER_ELEMENTS = 2**19


class SinglePrecisionLinear:
    """``torch.nn.functional`` as FlexGen's modules see it, with another ``linear``."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``torch.nn.functional.linear``.

        Parameters
        ----------
        inputs
            ``(..., width)``. Of another type than float16, or not on the CPU: torch computes it.
        weight, bias
            ``(outputs, width)`` and ``(outputs,)``.

        Returns
        -------
        torch.Tensor
            ``(..., outputs)``, of the inputs' type.
        """
        if inputs.dtype is not torch.float16 or inputs.device.type != "cpu":
            return functional.linear(inputs, weight, bias)
        outputs, width = weight.shape
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

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def functional_of(run: FlexGenRun) -> Any:
    """What FlexGen's modules use as ``torch.nn.functional`` in a run."""
    if run.accelerator == "host" and run.cpu_linear == "single":
        return SinglePrecisionLinear()
    return functional
