"""The one way of a torch tensor into a kernel: checked, then handed over as a plain view."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch._compile import _disable_dynamo

from cxl_offload import _C

untraced = _disable_dynamo
"""Marks a function that torch.compile runs as it is: while it traces, addresses of tensors mean
nothing, and what is written through them is not seen. torch.compiler.disable would import the
compiler at once."""

FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""The types that kernels read and write, and their names there."""

READ_FLOATS = {
    **FLOATS,
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}
"""Those and the types that some kernels read only."""

_NAMES = {**READ_FLOATS, torch.int8: "int8", torch.uint8: "uint8"}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a distributed tensor; any other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # the tensor that the distributed one holds, rather than an alias of it
        local: torch.Tensor = tensor.to_local()
    return local


def tensor_view(
    tensor: torch.Tensor,
    name: str,
    *,
    dtypes: Collection[torch.dtype] = tuple(FLOATS),
    strided: bool = False,
) -> _C.TensorView:
    """What a kernel may do with ``tensor``, or an error that says why not.

    Parameters
    ----------
    tensor
        Contiguous, in host memory, with storage of its own type. The view does not keep it alive.
    name
        What the caller calls it, for messages.
    dtypes
        The types that the kernel takes here.
    strided
        Whether the kernel takes any strides; it then checks those that it cannot.

    Raises
    ------
    TypeError
        Not a tensor, or a subclass whose bytes are not its values (a distributed, fake or
        functional tensor).
    ValueError
        Another device, layout or dtype, or not contiguous.
    """
    if type(tensor) is not torch.Tensor:
        _check_class(tensor, name)
    if not tensor.is_cpu:
        raise ValueError(f"{name} is on {tensor.device}; this kernel works on CPU tensors")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; pass a dense tensor")
    dtype = tensor.dtype
    if dtype not in dtypes:
        known = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {dtype}; this kernel takes {known}")
    if not (strided or tensor.is_contiguous()) or tensor.is_neg():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; it is never copied behind your back: pass a contiguous tensor"
        )
    return _C.TensorView(tensor.data_ptr(), _NAMES[dtype], tensor.shape, tensor.stride())


def _check_class(tensor: object, name: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; pass a torch.Tensor")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, whose bytes are not its values; "
            "pass the tensor inside it, e.g. to_local()"
        )


def touch(*tensors: torch.Tensor) -> None:
    """Tells autograd that a kernel wrote these tensors, as an in-place operator of torch does."""
    written = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(written)
