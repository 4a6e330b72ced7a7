"""Linear layers on the CPU, each by the way that is fastest here.

Which way is fastest depends on the processor, on the shape and on the number of rows: one with
arithmetic for half precision is best left to PyTorch, few rows are best read once by this package's
kernel, many rows of half precision are best multiplied by its tiles or in single precision by
PyTorch, which in half precision itself is many times slower where there is no arithmetic for it.
So the first calls of a shape take all ways in turns, each over the weights that are asked for, and
later calls the fastest. Calls of many rows are few and long: their way is chosen by parts.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch.nn import functional

from cxl_offload import _C
from cxl_offload.ops.int4_weight import Int4Weight
from cxl_offload.ops.linear import PreparedLayers, SinglePrecisionLinear, linear
from cxl_offload.ops.threads import Threads

LinearWay = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

KERNEL, TILES, INTEGERS, SINGLE, TORCH = "kernel", "tiles", "integers", "single", "torch"
"""Names of ways: this package's kernel, the same by tiles or by integers, which it does not take by
itself, PyTorch in single precision, PyTorch as it is."""

HALF_PRECISION = frozenset({torch.float16})
ALL_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
_ONLY_FOR = {TILES: frozenset({torch.float16, torch.uint8}), INTEGERS: frozenset({torch.uint8})}
"""Types of weights that are multiplied in a way only when asked; uint8: 4-bit codes."""

LinearKey = tuple[torch.dtype, int, int, int, bool]
"""Type, number of rows (the logarithm of the next power of two, at most :data:`LONGEST_PART`'s),
outputs, width, and whether the weights were read a moment ago, as by the batch before: they lie in
a cache then, where other ways are fastest."""

TRIALS = 4
"""Calls that take each way. The shortest counts, since other programs only make a call longer."""

PARTS = 8
"""A way is first tried on two of so many parts of the outputs: it may be a hundred times slower."""

HOPELESS = 2
"""A way that took so many times as long as another one is not tried again..."""

SHORT_S = 1e-3
"""...unless its part took no longer than this: what calls and threads need to begin then counts
more than what whole layers need, and trials cost little."""

MANY_ROWS = 64
"""Calls of more rows are those of prompts: few and long, so that no trial may take a whole one.
Parts of the first one show which way is fastest, since products take their time and not reading
weights."""

MANY_HOPELESS = 1.5
"""The fastest way beside PyTorch's is not tried further if its small parts take so many times as
long: each arranges all numbers of its rows for few outputs, so they do not show which is faster."""

LARGE_PARTS = 2
"""Parts of the outputs, of which each does."""

LONGEST_PART = 256
"""Rows of a part: calls of more rows are chosen for as if they had so many."""

WORTH_IT = 0.85
"""Of a call of many rows, another way than PyTorch has to need less than this share of its time."""

MOST_WEIGHTS = 1 << 16
"""Whose last reading is known. Weights that are made for each call would be new ones for ever."""


def kernel_ways(
    threads: Callable[[], Threads],
    view: Callable[[torch.Tensor], torch.Tensor | Int4Weight] = lambda weight: weight,
) -> dict[str, LinearWay]:
    """This package's ways on this processor, on the threads that are asked for at each call.

    ``view`` makes of each weight what :func:`~cxl_offload.ops.linear.linear` takes.
    """

    def way(isa: str) -> LinearWay:
        return lambda x, weight, bias: linear(x, view(weight), bias, threads=threads(), isa=isa)

    layers = PreparedLayers()

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen = view(weight)
        if isinstance(seen, Int4Weight):
            return linear(x, seen, bias, threads=threads())
        return layers(x, seen, bias, threads())

    ways: dict[str, LinearWay] = {KERNEL: kernel}
    if "amxbf16" in _C.bf16_products():
        ways[TILES] = way("amxbf16")
    if _C.has_integer_codes():
        ways[INTEGERS] = way("avx512vnni")
    return ways


def _threads() -> Threads:
    """As many as PyTorch has."""
    threads = torch.get_num_threads()
    return None if threads >= len(os.sched_getaffinity(0)) else threads


def _is_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether ways compute it: of one type, with rows of weights as they lie, no derivative."""
    return (
        weight.dtype is x.dtype
        and weight.is_cpu
        and weight.dim() == 2
        and weight.stride(1) == 1
        and weight.numel() > 0
        and (bias is None or bias.shape == weight.shape[:1])
        and not (
            torch.is_grad_enabled()
            and (
                x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
            )
        )
    )


class KernelLinear:
    """``torch.nn.functional.linear`` for float16 on the CPU, by one way in every run: this
    package's kernel, and for calls of more than :data:`MANY_ROWS` rows PyTorch in single precision.

    Unlike the fastest way, which is found by trials, it has the same bits whenever it is called.
    """

    def __init__(self) -> None:
        self._few, self._many = kernel_ways(_threads)[KERNEL], SinglePrecisionLinear()

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :meth:`MeasuredLinear.__call__`."""
        if inputs.dtype not in HALF_PRECISION or not _is_layer(inputs, weight, bias):
            return functional.linear(inputs, weight, bias)
        way = self._many if inputs.numel() > MANY_ROWS * inputs.shape[-1] else self._few
        return way(inputs, weight, bias)


class MeasuredLinear:
    """``torch.nn.functional.linear`` on the CPU.

    Parameters
    ----------
    types
        Of inputs and weights that are measured; others are PyTorch's.
    ways
        How each way is called, by name; :data:`TORCH` is one of them. None: all that this processor
        has, which take one caller at a time.
    model_bytes
        Of all weights; 0: as many as the calls have shown.
    chosen
        What an earlier one chose for the same ways, threads and memory. It is gone on with.

    Attributes
    ----------
    chosen
        Name of the way by :data:`LinearKey`.
    """

    def __init__(
        self,
        types: Collection[torch.dtype] = HALF_PRECISION,
        ways: Mapping[str, LinearWay] | None = None,
        model_bytes: int = 0,
        chosen: dict[LinearKey, str] | None = None,
    ) -> None:
        self.chosen: dict[LinearKey, str] = {} if chosen is None else chosen
        self._read_bytes = 0  # of weights, by all calls
        self._model_bytes = model_bytes
        self._seen_bytes = 0  # of different weights
        self._last_read: dict[int, int] = {}  # address of a weight -> bytes read until then
        self._types = types
        self._taken: dict[LinearKey, dict[str, list[float]]] = {}
        self._ways: Mapping[str, LinearWay] = ways or {
            **kernel_ways(_threads),
            SINGLE: SinglePrecisionLinear(),
            TORCH: functional.linear,
        }

    def __call__(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``torch.nn.functional.linear``, which computes all that the ways are not meant for:
        other types and devices, what has a derivative, turned or empty weights, other biases.

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
        if inputs.dtype not in self._types or not _is_layer(inputs, weight, bias):
            return functional.linear(inputs, weight, bias)
        return self.by(self.key(inputs, weight), inputs, weight, bias)

    def by(
        self,
        key: LinearKey,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """As a call, by the way of a key that :meth:`key` has just returned for it."""
        name = self.chosen.get(key)
        if name is None:
            return self._tried(key, inputs, weight, bias)
        return self._ways[name](inputs, weight, bias)

    def key(self, inputs: torch.Tensor, weight: torch.Tensor) -> LinearKey:
        """What layers and inputs have in common whose fastest way is the same.

        Notes that the weights are read now; so ask once for each call.
        """
        outputs, width = weight.shape
        rows = (min(inputs.numel() // inputs.shape[-1], LONGEST_PART) - 1).bit_length()
        return (weight.dtype, rows, outputs, width, self._reads_again(weight))

    def _reads_again(self, weight: torch.Tensor) -> bool:
        """Whether less than half of the model was read since these weights were."""
        address, before = weight.data_ptr(), self._read_bytes
        last = self._last_read.get(address)
        self._read_bytes = before + weight.nbytes
        if last is None:
            if len(self._last_read) >= MOST_WEIGHTS:
                self._last_read.clear()
                self._seen_bytes = 0
            self._seen_bytes += weight.nbytes
        self._last_read[address] = before
        model = max(self._model_bytes, self._seen_bytes)
        return last is not None and 2 * (before - last) < model

    @property
    def is_trying(self) -> bool:
        """Whether the way of a shape that was asked for is not chosen yet."""
        return any(key not in self.chosen for key in self._taken)

    def _tried(
        self,
        key: LinearKey,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call by the way that was tried least, or by that whose parts were the fastest."""
        if inputs.numel() > MANY_ROWS * inputs.shape[-1]:
            name = self.chosen[key] = self._fastest_by_parts(inputs, weight)
            return self._ways[name](inputs, weight, bias)
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = {name: [] for name in self._hopeful(inputs, weight)}
        name = min(taken, key=lambda name: len(taken[name]))
        before = time.perf_counter()
        result = self._ways[name](inputs, weight, bias)
        taken[name].append(time.perf_counter() - before)
        if len(taken) == 1 or all(len(seconds) >= TRIALS for seconds in taken.values()):
            self.chosen[key] = min(taken, key=lambda name: min(taken[name]))
        return result

    def _hopeful(self, inputs: torch.Tensor, weight: torch.Tensor) -> list[str]:
        """Ways that parts of the outputs do not show to be much slower than another."""
        best = self._parts_taken(inputs, weight, self._ways)
        least = max(HOPELESS * min(best.values()), SHORT_S)
        return [name for name, taken in best.items() if taken <= least]

    def _fastest_by_parts(self, inputs: torch.Tensor, weight: torch.Tensor) -> str:
        """Of some rows and some outputs; PyTorch's where no other is clearly faster."""
        rows = inputs.reshape(-1, inputs.shape[-1])[:LONGEST_PART]
        best = self._parts_taken(rows, weight, self._ways)
        by_torch = best.pop(TORCH, math.inf)
        name = min(best, key=lambda name: best[name], default=TORCH)
        if name == TORCH or best[name] > MANY_HOPELESS * by_torch:
            return TORCH
        if HOPELESS * best[name] < by_torch:
            return name
        best = self._parts_taken(rows, weight, (name, TORCH), LARGE_PARTS)
        return TORCH if WORTH_IT * best[TORCH] <= best[name] else name

    def _parts_taken(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        names: Iterable[str],
        parts: int = PARTS,
    ) -> dict[str, float]:
        """Seconds that each way needs at least for a part of the outputs."""
        step = -(-weight.shape[0] // parts)
        begins = itertools.cycle(range(0, weight.shape[0], step))
        best: dict[str, float] = {}
        for name in [*names] * 2:  # the first call makes threads and code
            if weight.dtype not in _ONLY_FOR.get(name, (weight.dtype,)):
                continue  # the kernel takes it by itself, or there is none for the type
            start = next(begins)
            part = weight[start : start + step]  # which nobody read yet
            before = time.perf_counter()
            self._ways[name](inputs, part, None)
            taken = time.perf_counter() - before
            best[name] = min(best.get(name, taken), taken)
        return best
