"""Tensors of any strides, looked at before their addresses are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cxl_offload.memory.bounds import check_bounds


class StridedTensor(Protocol):
    """What torch's CPU tensors have, so that they can be copied without importing torch."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def numel(self) -> int: ...
    def is_contiguous(self) -> bool: ...
    def storage_offset(self) -> int: ...
    def untyped_storage(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def check_bytes(tensor: StridedTensor, name: str) -> None:
    """Refuses a tensor whose bytes are not its values, or are not here."""
    device = getattr(tensor, "device", None)
    if device is not None and device.type != "cpu":
        raise ValueError(f"{name} is on {device}; both must be in host memory")
    for lazy in ("is_neg", "is_conj"):
        if getattr(tensor, lazy, bool)():
            raise ValueError(f"{name} is a lazy view ({lazy}); resolve it first")
    check_bounds(tensor, name)


def may_share_memory(tensor: StridedTensor) -> bool:
    """Whether two elements may lie at one address: a dimension steps over less than those inside.

    Like torch's own check it takes a few interleaved layouts for overlapping that are not.
    """
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False
