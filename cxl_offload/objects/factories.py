"""Operators of torch that make tensors: what they would make is asked on meta, then made placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

Operator: TypeAlias = OpOverload
Make: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""An uninitialised placed tensor of the shape, strides and type of one on meta."""

_EMPTY = {
    *(aten.empty, aten.empty_strided, aten.empty_permuted),
    *(aten.empty_like, aten.new_empty, aten.new_empty_strided),
}
_CONSTANT = {
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), 0),
    **dict.fromkeys((aten.ones, aten.ones_like, aten.new_ones), 1),
}
_FULL = {aten.full: 1, aten.full_like: 1, aten.new_full: 2}
"""And the number of the argument that is the value."""

_COPY = {aten.clone, aten._to_copy}
# Made in ordinary memory first: how torch draws or counts them is not repeated here.
_RESULT = {
    *(aten.arange, aten.linspace, aten.logspace, aten.eye, aten.scalar_tensor),
    *(aten.rand, aten.randn, aten.randint, aten.randperm, aten.normal),
    *(aten.rand_like, aten.randn_like, aten.randint_like),
    *(aten.tril_indices, aten.triu_indices, aten.lift_fresh, aten.stack, aten.cat),
}
_OF_A_STORAGE = {aten.set_}

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)

FACTORIES = frozenset({*_EMPTY, *_CONSTANT, *_FULL, *_COPY, *_RESULT})


def is_plain(tensor: object) -> bool:
    """A tensor whose values are bytes of ordinary host memory, and no more than those."""
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in _PLAIN_CLASSES
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )


def reason_to_leave(func: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Why a factory called so is none of ours; empty where its tensor is for no CPU."""
    first = next((each for each in args if isinstance(each, torch.Tensor)), None)
    device = kwargs.get("device") or (torch.device("cpu") if first is None else first.device)
    if torch.device(device).type != "cpu":
        return ""
    layout = kwargs.get("layout") or (torch.strided if first is None else first.layout)
    if layout is not torch.strided:
        return f"its layout is {layout}"
    if kwargs.get("pin_memory"):
        return "torch pins it itself"
    if first is None:
        return None
    if type(first) not in _PLAIN_CLASSES:
        return ""
    if func.overloadpacket is aten.lift_fresh and not first.untyped_storage().resizable():
        return "numpy or another library holds its memory"
    return "it is quantized" if first.is_quantized else None


def made_by(func: Operator, args: Sequence[Any], kwargs: dict[str, Any], make: Make) -> Any:
    """What a factory returns, in memory of ``make``; an ordinary tensor where it was made first."""
    packet = func.overloadpacket
    if packet in _RESULT or (packet in _COPY and not is_plain(args[0])):
        return func(*args, **kwargs)
    if packet is aten.clone:
        form = kwargs.get("memory_format") or torch.preserve_format
        shape = aten.empty_like(args[0], device="meta", memory_format=form)
        return make(shape).copy_(args[0])
    meta = func(*args, **{**kwargs, "device": torch.device("meta")})
    made = make(cast("torch.Tensor", meta))
    if packet in _COPY:
        return made.copy_(args[0])
    if packet in _CONSTANT:
        return made.fill_(_CONSTANT[packet])
    if packet in _FULL:
        at = _FULL[packet]
        return made.fill_(args[at] if len(args) > at else kwargs["fill_value"])
    return made


def is_given_a_storage(func: Operator) -> bool:
    """Whether an operator makes a tensor show memory that something else allocated."""
    return func.overloadpacket in _OF_A_STORAGE
