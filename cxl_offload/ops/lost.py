"""Errors of lost memory that name tensors, as their users know them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cxl_offload.errors import LostMemory, MemoryLostError
from cxl_offload.ops.update import ParamUpdate
from cxl_offload.ops.view import local_tensor

Named = Iterable[tuple[str, torch.Tensor]]


@contextlib.contextmanager
def naming(named: Callable[[], Named]) -> Iterator[None]:
    """Gives what is lost inside the names of tensors, which are asked for only then.

    Raises
    ------
    MemoryLostError
        As raised inside, with offsets counted from the tensors' first bytes.
    """
    try:
        yield
    except MemoryLostError as error:
        tensors = list(named())
        losses = [_renamed(loss, tensors) for loss in error.losses]
        raise MemoryLostError(losses, is_whole=error.is_whole) from None


def _renamed(loss: LostMemory, named: Named) -> LostMemory:
    for name, tensor in named:
        begin = tensor.data_ptr()
        if begin <= loss.address < begin + tensor.nbytes:
            return replace(loss, name=name, offset=loss.address - begin)
    return loss


def tensors_of(
    groups: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All that the updates of an optimizer read and write, by names for people."""
    names: dict[int, str] = {}
    for group in groups:
        given = group.get("param_names", ())
        for at, param in enumerate(group["params"]):
            number = f"parameter {len(names)}"
            name = f"{number} ({given[at]})" if at < len(given) else number
            names[local_tensor(param).data_ptr()] = name
    for update in updates:
        name = f"{names.get(update.param.data_ptr(), 'a parameter')} {tuple(update.param.shape)}"
        yield name, update.param
        yield f"the gradient of {name}", update.grad
        for state, tensor in update.states:
            yield f"{state} of {name}", tensor
        for (state, _), scales in zip(update.states, update.scales, strict=False):
            yield f"the scales of {state} of {name}", scales
        if update.copy is not None:
            yield f"the low-precision copy of {name}", update.copy
