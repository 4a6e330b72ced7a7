"""Linear layers of half-precision weights on the CPU, each by the way that is fastest here.

Which way is fastest depends on the processor, on the shape and on the number of rows: one with
arithmetic for half precision is best left to PyTorch, few rows are best read once by this package's
kernel, many rows are best multiplied in single precision by PyTorch. So the first call of a shape
times all ways, on parts of its own weights, and later calls take the fastest.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from cxl_offload.ops.linear import SinglePrecisionLinear, linear

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

TRIALS = 3
"""Trials of each way. The shortest counts, since other programs only make a trial longer."""

PARTS = 4
"""A trial multiplies one of so many parts of the outputs, the next trial the next part: less than
the whole layer, and weights that the trial before did not leave in a cache."""

HOPELESS = 2
"""A way that took so many times as long as another one is not tried again."""


def _kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """This package's, on as many threads as PyTorch has."""
    threads = torch.get_num_threads()
    everywhere = threads >= len(os.sched_getaffinity(0))
    return linear(x, weight, bias, threads=None if everywhere else threads)


class MeasuredLinear:
    """``torch.nn.functional.linear`` for float16 on the CPU; one caller at a time.

    Attributes
    ----------
    chosen
        Name of the way by the number of rows (the next power of two), outputs and width.
    """

    def __init__(self) -> None:
        self.chosen: dict[tuple[int, int, int], str] = {}
        self._ways: dict[str, Way] = {
            "kernel": _kernel,
            "single": SinglePrecisionLinear(),
            "half": functional.linear,
        }

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``torch.nn.functional.linear``, which computes other types and other devices.

        Parameters
        ----------
        inputs
            ``(..., width)``.
        weight, bias
            ``(outputs, width)`` and ``(outputs,)``.

        Returns
        -------
        torch.Tensor
            ``(..., outputs)``, of the inputs' type: sums in single precision, rounded once.
        """
        types = (inputs.dtype, weight.dtype, weight.device.type)
        if types != (torch.float16, torch.float16, "cpu"):
            return functional.linear(inputs, weight, bias)
        outputs, width = weight.shape
        key = ((inputs.numel() // width - 1).bit_length(), outputs, width)
        name = self.chosen.get(key)
        if name is None:
            name = self.chosen[key] = self._fastest(inputs, weight)
        return self._ways[name](inputs, weight, bias)

    def _fastest(self, inputs: torch.Tensor, weight: torch.Tensor) -> str:
        step = -(-weight.shape[0] // PARTS)
        best: dict[str, float] = {}
        begins = itertools.cycle(range(0, weight.shape[0], step))
        for _ in range(TRIALS):
            for name, way in self._ways.items():
                if best and best.get(name, 0.0) > HOPELESS * min(best.values()):
                    continue
                start = next(begins)
                part = weight[start : start + step]
                before = time.perf_counter()
                way(inputs, part, None)
                taken = time.perf_counter() - before
                best[name] = min(best.get(name, taken), taken)
        return min(best, key=lambda name: best[name])
