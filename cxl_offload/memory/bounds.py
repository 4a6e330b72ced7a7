"""What callers hand in, looked at before it reaches the core: sizes, names, tensors."""

from __future__ import annotations

import math
import operator
from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def quoted(value: object) -> str:
    """``repr`` of a value for a message; the middle of a long one is left out."""
    return _SHORT.repr(value)


def whole_number(value: Any, name: str) -> int:
    """An integer, as Python understands one (``operator.index``: numpy's and torch's too).

    Raises
    ------
    TypeError
        Names what the caller calls it, and the value.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} {quoted(value)} is no integer") from None


def check_size(value: Any, name: str, *, least: int = 1) -> None:
    """Refuses what is no integer (TypeError) or less than ``least`` (ValueError)."""
    if whole_number(value, name) < least:
        raise ValueError(f"{name} is {quoted(value)}; it must be at least {least}")


def check_number(value: Any, name: str, *, most: float = math.inf) -> None:
    """Refuses what is no number (TypeError), NaN, and what is not 0 to ``most`` (ValueError)."""
    try:
        inside = bool(0 <= value <= most)
    except TypeError:
        raise TypeError(f"{name} {quoted(value)} is no number") from None
    if not inside:
        span = "at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise ValueError(f"{name} is {quoted(value)}; it must be {span}")


def check_bounds(tensor: Any, name: str) -> None:
    """Refuses a tensor whose elements are not all in its storage, before an address of it is used.

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
        Names the bytes that are needed and those that are there; or there never were any.
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
    if tensor._is_zerotensor() or not tensor.data_ptr():
        raise ValueError(
            f"{name} is zeros that torch keeps without memory; pass {name}.clone(), which has some"
        )
