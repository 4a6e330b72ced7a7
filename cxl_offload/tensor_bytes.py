"""Where the bytes of torch's tensors lie: their addresses, and whose memory is their values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cxl_offload.memory.bounds import check_bounds
from cxl_offload.memory.whole import refuse_lost


def check_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} is no tensor")


def has_own_bytes(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values, also of a subclass; not where operators are its own."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def held_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a tensor's bytes: itself, or those inside of a subclass around them.

    A distributed tensor holds this process's part; a quantized one its codes and scales.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    # A distributed tensor names its mesh there too.
    return [held for part in parts if isinstance(part, torch.Tensor) for held in held_tensors(part)]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from the first to the last element of a tensor, gaps included."""
    check_tensor(tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} has no NUMA placement; only CPU tensors do")
    if tensor.numel() == 0:
        return 0, 0
    check_bounds(tensor, "tensor")
    last = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def host_ranges(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Where they lie; a subclass around others, whose bytes are not its own, lies nowhere."""
    return [
        span_of(tensor)
        for tensor in tensors
        if has_own_bytes(tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided
    ]


def check_whole(*tensors: torch.Tensor) -> None:
    """Raises MemoryLostError where something of host tensors is lost; gaps in them count too."""
    refuse_lost(lambda: host_ranges(tensors))
