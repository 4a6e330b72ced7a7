"""How many steps a parameter has had: counted together when all of them are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cxl_offload.memory.bounds import check_bounds, quoted

_MOST_STEPS = 2**63
"""The core counts in 64 bits."""


_COUNTING = (torch.float32, torch.float64, torch.int64)
"""Types that hold as many steps as a training has."""


def step_count(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A step as torch's optimizers count it: never of torch's default type, nor on its default
    device, as a count in bfloat16 would stay at 256."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def next_step(state: Mapping[str, Any], param: torch.Tensor) -> int:
    """The step after those that a parameter has had.

    Raises
    ------
    ValueError
        Its count is none, which names the shape of the parameter; or its storage was resized.
    """
    held = state["step"]
    if _has_storage(held):
        check_bounds(held, "a step")
    try:
        value = held.item() if isinstance(held, torch.Tensor) else held
        step = int(value) + 1
        is_whole = step - 1 == value
    except (TypeError, ValueError, OverflowError, RuntimeError):
        step, is_whole = 0, False
    if not (is_whole and 0 < step < _MOST_STEPS):
        raise ValueError(
            f"the states of a parameter of shape {tuple(param.shape)} have a step of "
            f"{quoted(state['step'])}; it must be a whole number of steps"
        )
    return step


def _has_storage(held: object) -> bool:
    """Whether torch reads it from memory without a look at how long that is."""
    return (
        isinstance(held, torch.Tensor)
        and type(held) in (torch.Tensor, torch.nn.Parameter)
        and held.is_cpu
        and held.layout is torch.strided
        and not held._is_zerotensor()
        and not torch._is_functional_tensor(held)
    )


def _holds_steps(held: torch.Tensor) -> bool:
    """Whether writing a step to it can neither fail nor lose something."""
    return (
        type(held) is torch.Tensor
        and held.dtype in _COUNTING
        and _has_storage(held)
        and not held.is_neg()
        and (not held.is_inference() or torch.is_inference_mode_enabled())
    )


class StepCounts:
    """The steps of many parameters, which are set in as few calls as can be."""

    def __init__(self) -> None:
        self._replacing: list[Callable[[], object]] = []
        self._tensors: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, state: dict[str, Any], step: int) -> None:
        """Notes that ``state["step"]`` is to be ``step``: a tensor as torch has it, or an int as
        DeepSpeed does. A tensor that cannot be written, or cannot hold it, is replaced."""
        held = state["step"]
        if not isinstance(held, torch.Tensor):
            self._replacing.append(functools.partial(state.__setitem__, "step", step))
        elif _holds_steps(held):
            self._tensors.setdefault((step, held.dtype), []).append(held)
        else:
            made = step_count(step)
            self._replacing.append(functools.partial(state.__setitem__, "step", made))

    def places(self) -> list[tuple[int, int]]:
        """Address and bytes of each tensor that is written in place."""
        return [
            (held.data_ptr(), held.nbytes) for several in self._tensors.values() for held in several
        ]

    def setting(self) -> list[Callable[[], object]]:
        """Built-in functions that set them: no signal's handler runs between two."""
        tensors = [
            functools.partial(torch._foreach_copy_, held, [step_count(*count)] * len(held))
            for count, held in self._tensors.items()
        ]
        return [*tensors, *self._replacing]
