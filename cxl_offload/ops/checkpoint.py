"""States out of the checkpoints of optimizers: checked as a whole before any of them is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cxl_offload.memory.bounds import check_bounds
from cxl_offload.ops.lost import reading_whole
from cxl_offload.ops.state_codes import (
    CODES,
    SCALES,
    float_states,
    has_codes,
    of_peers,
    scale_count,
)
from cxl_offload.ops.step_counts import step_count
from cxl_offload.ops.view import local_tensor

if TYPE_CHECKING:
    from cxl_offload.ops.optimizer import OnePassOptimizer

States = dict[str, Any]


def read_states(
    optimizer: OnePassOptimizer, given: Mapping[str, Any]
) -> tuple[dict[torch.Tensor, States], dict[Any, Any]]:
    """The states that a checkpoint has for the parameters of an optimizer, in their tier.

    Parameters
    ----------
    optimizer
        Is not changed.
    given
        What ``state_dict()`` of this class, of torch's or of DeepSpeed's gave. None of its tensors
        is shared by the result.

    Returns
    -------
    tuple
        Parameter to its states, and what the checkpoint has for none of the parameters.

    Raises
    ------
    ValueError
        The checkpoint is not one, or does not fit; the message says where.
    MemoryLostError
        Memory of the checkpoint failed.
    """
    _check_form(given)
    for group in given["param_groups"]:
        _check_settings(optimizer, group)
    pairs = dict(_pairs(optimizer, given["param_groups"]))
    for key in given["state"]:
        if isinstance(key, int) and key not in pairs:
            raise ValueError(f"load_state_dict: states of parameter {key}, which no group names")
    stored = {key: given["state"].get(key, {}) for key in pairs}
    values = {key: of_peers(v) if isinstance(v, Mapping) else v for key, v in stored.items()}
    for key, param in pairs.items():
        _check(optimizer, key, param, values[key])
    with reading_whole(lambda: _named(values)):
        states = {
            param: _placed(optimizer, param, values[key])
            for key, param in pairs.items()
            if values[key]
        }
    return states, {key: value for key, value in given["state"].items() if key not in pairs}


def _named(values: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, states in values.items():
        for name, value in states.items():
            if isinstance(value, torch.Tensor):
                yield f"{name} of parameter {key} of the checkpoint", local_tensor(value)


def _check_form(given: Any) -> None:
    """What every optimizer's checkpoint is made of."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        names = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ValueError(
            f"load_state_dict: no optimizer's checkpoint: it has {names} rather than 'state' and "
            "'param_groups'"
        )
    groups = given["param_groups"]
    whole = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    )
    if not whole or not isinstance(given["state"], Mapping):
        raise ValueError(
            "load_state_dict: 'state' must be a dict, 'param_groups' a list of dicts whose "
            "'params' is a list"
        )


def _check_settings(optimizer: OnePassOptimizer, group: Mapping[str, Any]) -> None:
    """A group is of this kind of optimizer, and steps can be made with it."""
    missing = sorted({"lr", "betas", "eps"} & set(optimizer.defaults) - set(group))
    if missing:
        raise ValueError(
            f"load_state_dict: a group has no {', '.join(missing)}: a checkpoint of another "
            "optimizer"
        )
    optimizer.check_group({**optimizer.defaults, **group})


def _pairs(
    optimizer: OnePassOptimizer, groups: list[dict[str, Any]]
) -> Iterator[tuple[Any, torch.Tensor]]:
    """The checkpoint's names of the parameters, which are matched by their order in the groups."""
    saved = [len(group["params"]) for group in groups]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if saved != own:
        raise ValueError(
            f"load_state_dict: the checkpoint has groups of {saved} parameters and this "
            f"{type(optimizer).__name__} groups of {own}"
        )
    for saved_group, group in zip(groups, optimizer.param_groups, strict=True):
        yield from zip(saved_group["params"], group["params"], strict=True)


def _check(optimizer: OnePassOptimizer, key: Any, param: torch.Tensor, values: Any) -> None:
    where = f"load_state_dict: parameter {key!r}"
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} has a {type(values).__name__} for its states; it must be a dict")
    if not values:
        return
    names = optimizer.state_names
    if has_codes(values):
        names = tuple(name + part for name in names for part in (CODES, SCALES))
    needed = (*names, *(("step",) if optimizer.counts_steps else ()))
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(
            f"{where} has {', '.join(map(str, values))} but no {', '.join(missing)}: "
            "a checkpoint of another optimizer"
        )
    known = {"step", *names}
    others = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
    foreign = sorted(str(name) for name in others if name not in known)
    if foreign:
        raise ValueError(
            f"{where} has {', '.join(foreign)}, which {type(optimizer).__name__} does not keep: a "
            "checkpoint of another optimizer"
        )
    if "step" in values:
        _check_step(where, values["step"])
    shape = tuple(local_tensor(param).shape)
    for name in names:
        if has_codes(values):
            blocks = (scale_count(local_tensor(param).numel()),)
            _check_codes(
                f"{where}: {name}", values[name], blocks if name.endswith(SCALES) else shape
            )
        else:
            _check_value(f"{where}: {name}", values[name], shape)


_MOST_STEPS = 2**53
"""Up to here a float64, which torch's steps may be, counts every one."""


def _check_step(where: str, step: Any) -> None:
    count = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if isinstance(count, bool) or not isinstance(count, int | float):
        raise ValueError(f"{where}: step is a {type(step).__name__}; it must be one number")
    if not (0 <= count <= _MOST_STEPS and float(count).is_integer()):
        raise ValueError(
            f"{where}: step is {count}; it must be a whole number from 0 to {_MOST_STEPS}"
        )


def _check_value(where: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a tensor")
    local = local_tensor(value)
    if tuple(local.shape) != shape:
        raise ValueError(
            f"{where} has shape {tuple(local.shape)} and the parameter {shape}; "
            "they must be the same"
        )
    if not local.is_floating_point() or local.layout is not torch.strided or local.is_meta:
        raise ValueError(
            f"{where} is {local.dtype}, {local.layout}, on {local.device}; it must hold numbers of "
            "a floating-point type"
        )
    check_bounds(local, where)


def _check_codes(where: str, value: Any, shape: tuple[int, ...]) -> None:
    fits = isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and not value.is_meta
    if not fits or tuple(value.shape) != shape or value.layout is not torch.strided:
        what = type(value).__name__
        if isinstance(value, torch.Tensor):
            what = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
        raise ValueError(
            f"{where} is {what}; states in 8 bits of this parameter, in blocks of 128 elements, "
            f"have there torch.uint8 of shape {shape}"
        )
    check_bounds(value, where)


def _placed(optimizer: OnePassOptimizer, param: torch.Tensor, values: Mapping[str, Any]) -> States:
    step = values.get("step", 0.0)
    if has_codes(values) and optimizer.in_codes:
        placed = optimizer.place_codes(values)
    else:
        plain = float_states(values) if has_codes(values) else values
        placed = {}
        for name in optimizer.state_names:
            placed |= optimizer.placed_state(param, name, plain[name])
    names = {*optimizer.state_names, *placed}
    kept = {
        key: value
        for key, value in values.items()
        if key not in names and not str(key).endswith((CODES, SCALES))
    }
    # DeepSpeed's are integers and stay so.
    return {**kept, "step": step if isinstance(step, int) else step_count(float(step)), **placed}
