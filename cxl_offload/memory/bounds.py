"""Whether a tensor has the memory that it says; its storage may have been resized since."""

from __future__ import annotations

from typing import Any


def check_bounds(tensor: Any, name: str) -> None:
    """Refuses a tensor that reaches beyond its storage, before an address of it is used.

    Parameters
    ----------
    tensor
        Of torch, strided. torch itself looks at shapes only, and crashes where resizing a storage
        (``untyped_storage().resize_``) left a tensor without its memory. What has no storage to ask
        is taken at its word.
    name
        What the caller calls it, for the message.

    Raises
    ------
    ValueError
        Names the bytes that are needed and those that are there.
    """
    if not hasattr(tensor, "untyped_storage"):
        return
    count: int = tensor.numel()
    if count == 0:
        return
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((length - 1) * step for length, step in steps)
    needed: int = (tensor.storage_offset() + count) * tensor.element_size()
    held: int = tensor.untyped_storage().nbytes()
    if held < needed:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} needs {needed} bytes of its storage, which has "
            f"{held}: somebody resized it, as FSDP does while parameters are sharded"
        )
