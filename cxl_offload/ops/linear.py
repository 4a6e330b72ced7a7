"""Linear layers of few rows over weights in host memory: ``y = x w^T + bias``.

With the few rows of decoding, reading the weights takes longest. :func:`linear` reads each weight
once, where it lies and in its own type, and multiplies it in float32. Many rows, as in a prefill,
are better left to ``torch.nn.functional.linear``, but for float16 where there are tiles
(``isa="amxbf16"``): :mod:`cxl_offload.ops.measured_linear` finds out which is faster.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch.nn import functional

from cxl_offload import _C
from cxl_offload.ops.int4_weight import Int4Weight
from cxl_offload.ops.threads import Threads, kernel_for, team_for
from cxl_offload.ops.view import (
    FLOATS,
    as_of_now,
    check_class,
    has_plain_rows,
    refuse_derivatives,
    refuse_recording,
    tensor_view,
)
from cxl_offload.tensor import copy_whole

WEIGHT_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
)
"""What weights may be, besides 4-bit codes."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    threads: Threads = None,
    isa: str = "",
) -> torch.Tensor:
    """As ``torch.nn.functional.linear``, for few rows and weights of fewer bits than they need.

    Parameters
    ----------
    x
        ``(..., width)``, float32, bfloat16 or float16, whatever the weights are; meant for 1 to 64
        rows, and right for any number.
    weight
        ``(outputs, width)`` of a type in :data:`WEIGHT_DTYPES`, in host memory. Rows are
        contiguous and any number of elements apart, as in views into flat buffers; nothing is
        copied. Or 4-bit codes: :class:`~cxl_offload.ops.int4_weight.Int4Weight`.
    bias
        ``(outputs,)``, float32, bfloat16 or float16, contiguous.
    scale
        What weights are multiplied by, float32: one number, ``(outputs,)``, ``(outputs, 1)``, or
        for weights of 8 bits ``(outputs, groups)``, where a group is ``width / groups`` weights of
        a row.
    out_dtype
        float32, bfloat16 or float16; None: x's.
    threads
        See :data:`cxl_offload.ops.threads.Threads`. On several nodes threads begin with the weights
        on their own.
    isa
        "scalar", "neon", "sve256", "avx2" or "avx512"; "avx512bf16" or "amxbf16", which multiply
        numbers that are sums of one or two numbers of bfloat16 without loss as such, in vectors (x
        of bfloat16) or in tiles (of float16 too). They take subnormal numbers of bfloat16 for zero,
        and tiles make NaN of an infinity of float16; "avx512vbmi", which multiplies weights of
        float8_e4m3fn and x of bfloat16 as float32, with the bits of "avx512bf16" but for subnormal
        numbers, which it keeps; or "avx512vnni", which multiplies 4-bit codes by integers of 24
        bits that stand for x, with one unit for every 128 numbers (rows of a multiple of 128 codes,
        groups of 32, 64 or a multiple of 128). Layers for which a name is not meant are multiplied
        as float32. Empty: the best that this processor has at one row, but for the integers; and
        "avx512bf16" only where its products are at least as fast as those of float32, which the
        first call measures. So 4-bit codes and weights of float16 are multiplied in vectors, while
        tiles are faster for more rows (docs/linear-measured.md).

    Returns
    -------
    torch.Tensor
        ``(..., outputs)``, a new tensor without a derivative. Products and sums are float32,
        rounded once to ``out_dtype``. A row has the same bits whatever the other rows and the
        number of threads are. With 4-bit codes an infinity in ``x`` may give NaN.

    Raises
    ------
    ValueError, TypeError
        Before anything is computed: shapes, types or strides that do not fit, or gradients that are
        wanted.
    """
    refuse_recording("linear")
    refuse_derivatives("linear", x, weight, bias, scale)
    rows = _rows_of(x)
    dtypes: tuple[torch.dtype, ...]
    if isinstance(weight, Int4Weight):
        weight = Int4Weight(as_of_now(weight.codes), as_of_now(weight.groups), weight.form)
        matrix, dtypes = weight.codes, (torch.uint8,)
    else:
        check_class(weight, "weight")
        matrix, dtypes = as_of_now(weight), WEIGHT_DTYPES
    bias, scale = as_of_now(bias), as_of_now(scale)
    dtype = x.dtype if out_dtype is None else out_dtype
    out = torch.empty(rows.shape[0], matrix.shape[0], dtype=dtype, device="cpu")
    team = team_for(threads)
    _C.run_linear(
        tensor_view(rows, "x", strided=True),
        tensor_view(matrix, "weight", dtypes=dtypes, strided=True),
        tensor_view(out, "out"),
        team,
        bias=None if bias is None else tensor_view(bias, "bias"),
        scale=None if scale is None else _scale_view(scale, matrix.shape[0]),
        groups=weight.groups_view() if isinstance(weight, Int4Weight) else None,
        isa=isa,
        kernel=kernel_for(team),
    )
    return out.view(*x.shape[:-1], matrix.shape[0])


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` in two dimensions, each row contiguous; rows of no elements count as well."""
    check_class(x, "x")
    if x.is_nested:
        raise ValueError("linear: x is a nested tensor; pass its parts (unbind()), or padded rows")
    if x.dim() == 0:
        raise ValueError("linear: x has no dimension; give it (..., width)")
    x = x.resolve_neg()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _scale_view(scale: torch.Tensor, outputs: int) -> _C.TensorView:
    tensor_view(scale, "scale", dtypes=(torch.float32,), strided=True)  # before it has other shapes
    if outputs and not scale.numel():  # no numbers would be taken for no scale
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} has no number for any of {outputs} outputs"
        )
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(outputs, 1)
    elif scale.dim() == 1:
        scale = scale.unsqueeze(1)
    return tensor_view(scale, "scale", dtypes=(torch.float32,), strided=True)


class PreparedLinear:
    """:func:`linear` for one weight and many calls: what does not change is looked at once.

    Parameters
    ----------
    weight, bias
        As of :func:`linear`, without scales. Their memory is read at every call and kept alive; a
        call after their storage was resized is a ValueError, or reads what it has now. Ask
        :meth:`is_of` before a call where a tensor may have got another (``weight.data = new``).
    """

    __slots__ = ("_addresses", "_bias", "_held", "_layer", "_outputs", "_weight", "_width")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = as_of_now(weight), as_of_now(bias)
        self._layer = _C.PreparedLinear(
            tensor_view(self._weight, "weight", dtypes=WEIGHT_DTYPES, strided=True),
            None if self._bias is None else tensor_view(self._bias, "bias"),
        )
        self._outputs, self._width = self._weight.shape
        self._held = _memory_of(self._weight, self._bias)
        self._addresses = (
            self._weight.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
        )

    def is_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether weight and bias are as they were: memory, shape, strides and type."""
        held, held_bias = self._weight, self._bias
        if (weight.data_ptr(), 0 if bias is None else bias.data_ptr()) != self._addresses:
            return False
        if weight.dtype is not held.dtype or not held.is_set_to(weight):
            return False
        if bias is None or held_bias is None:
            return bias is held_bias
        return bias.dtype is held_bias.dtype and held_bias.is_set_to(bias)

    def __call__(self, x: torch.Tensor, threads: Threads = None) -> torch.Tensor:
        """As :func:`linear`; nothing is said about gradients."""
        refuse_recording("linear")
        width = self._width
        if _memory_of(self._weight, self._bias) != self._held or not has_plain_rows(x, width):
            return linear(as_of_now(x), self._weight, self._bias, threads=threads)
        y = x.new_empty((*x.shape[:-1], self._outputs))
        team, name = team_for(threads), FLOATS[x.dtype]
        rows = x.numel() // width
        self._layer.run(x.data_ptr(), rows, name, y.data_ptr(), team, kernel_for(team))
        return y


def _memory_of(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """Where a layer's storages are, and how large: FSDP resizes storages in place."""
    held = weight.untyped_storage()
    if bias is None:
        return held.data_ptr(), held.nbytes()
    beside = bias.untyped_storage()
    return held.data_ptr(), held.nbytes(), beside.data_ptr(), beside.nbytes()


class PreparedLayers:
    """:func:`linear` for layers that are called again and again, each prepared at its first call.

    A weight is kept alive by its owner alone: what was prepared for it goes when it does.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], PreparedLinear]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        threads: Threads = None,
    ) -> torch.Tensor:
        """As :func:`linear`, without scales."""
        refuse_derivatives("linear", x, weight, bias)
        weak, layer = self._known.get(id(weight), _NO_LAYER)
        if layer is None or weak() is not weight or not layer.is_of(weight, bias):
            layer = self._prepared(weight, bias)
        return layer(x, threads)

    def _prepared(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PreparedLinear:
        check_class(weight, "weight")
        layer, key = PreparedLinear(weight, bias), id(weight)
        self._known[key] = weakref.ref(weight, lambda _: self._known.pop(key, None)), layer
        return layer


_NO_LAYER: tuple[Callable[[], None], None] = (lambda: None), None

BUFFER_ELEMENTS = 2**19


class SinglePrecisionLinear:
    """``torch.nn.functional.linear`` for float16 on the CPU; one caller at a time.

    Few CPUs multiply matrices of half precision, and PyTorch is then several times slower than in
    single precision. Here weights become single precision a few rows at a time, in a buffer that
    stays in the cache, and products are rounded to half precision once, at the end.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, device="cpu")

    def __call__(
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
        outputs, width = weight.shape
        on_cpu = inputs.dtype is torch.float16 and inputs.device.type == "cpu"
        if not on_cpu:
            return functional.linear(inputs, weight, bias)
        rows = inputs.float().reshape(math.prod(inputs.shape[:-1]), width)
        result = torch.empty(rows.shape[0], outputs, dtype=torch.float16, device="cpu")
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
            self._buffer = torch.empty(weight.numel(), device="cpu")
        return copy_whole(self._buffer[: weight.numel()].view(weight.shape), weight)
