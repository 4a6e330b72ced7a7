"""Errors of lost memory that name tensors, as their users know them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cxl_offload.errors import LostMemory, MemoryLostError
from cxl_offload.memory.whole import refuse_lost
from cxl_offload.ops.update import ParamUpdate
from cxl_offload.ops.view import local_tensor
from cxl_offload.tensor_bytes import host_ranges

if TYPE_CHECKING:
    from cxl_offload.ops.optimizer import OnePassOptimizer

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
        raise with_names(error, named()) from None


def with_names(error: MemoryLostError, named: Named) -> MemoryLostError:
    """The same losses by the names of tensors, with offsets counted from their first bytes."""
    tensors = list(named)
    losses = [_renamed(loss, tensors) for loss in error.losses]
    return MemoryLostError(losses, is_whole=error.is_whole)


def check_named(named: Callable[[], Named]) -> None:
    """Raises MemoryLostError where something of tensors is lost, by their names."""
    with naming(named):
        refuse_lost(lambda: host_ranges(tensor for _, tensor in named()))


@contextlib.contextmanager
def reading_whole(named: Callable[[], Named]) -> Iterator[None]:
    """Around what is computed from tensors: none of them is lost, before or after."""
    check_named(named)
    with naming(named):
        yield
    check_named(named)


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
    names = param_names(groups)
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


def param_names(groups: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The names of an optimizer's parameters, by their addresses."""
    names: dict[int, str] = {}
    for group in groups:
        given = group.get("param_names", ())
        for at, param in enumerate(group["params"]):
            number = f"parameter {len(names)}"
            name = f"{number} ({given[at]})" if at < len(given) else number
            names[local_tensor(param).data_ptr()] = name
    return names


def states_of(
    optimizer: OnePassOptimizer, params: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of an optimizer and their states, by names for people."""
    names = param_names(optimizer.param_groups)
    for param in params:
        local = local_tensor(param)
        name = f"{names.get(local.data_ptr(), 'a parameter')} {tuple(local.shape)}"
        yield name, local
        states = optimizer.state.get(param, {})
        for state in optimizer.kept_names:
            if state in states:
                yield f"{state} of {name}", local_tensor(states[state])
