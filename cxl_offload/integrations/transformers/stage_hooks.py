"""Hooks of modules that a stream gives their weights, and of embeddings that the CPU looks up."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cxl_offload.integrations.transformers.asked_experts import StackedExperts
from cxl_offload.integrations.transformers.compute_device import moved
from cxl_offload.integrations.transformers.streamed_weights import WeightStream
from cxl_offload.ops.view import untraced


@untraced
def on_the_host(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module is given goes to the CPU."""
    host = torch.device("cpu")
    return moved(args, host), moved(kwargs, host)


def found_rows(device: torch.device) -> Callable[..., Any]:
    """What was looked up goes to the device."""

    @untraced
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return moved(output, device)

    return hook


def before(stream: WeightStream, at: int, device: torch.device) -> Callable[..., Any]:
    """A stage begins, with all that it is given on the device."""

    @untraced
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = _shape_of_states(args, kwargs)
        if shape is None:
            stream.begin(at)
        else:
            stream.begin(at, math.prod(shape[:-1]), shape[0])
        return moved(args, device), moved(kwargs, device)

    return hook


def _shape_of_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Of the hidden states that a decoder layer is given."""
    states = kwargs.get("hidden_states", args[0] if args else None)
    return states.shape if isinstance(states, torch.Tensor) else None


def asking(
    stream: WeightStream, at: int, which: int, experts: StackedExperts
) -> Callable[..., None]:
    """Experts that their tokens ask for are copied."""

    @untraced
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream.ask(at, which, lambda: experts.numbers(args, kwargs))

    return hook


def after(stream: WeightStream, at: int) -> Callable[..., None]:
    """A stage ends, also by an error."""

    @untraced
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        stream.end(at)

    return hook


def let_threads_take_turns(
    model: nn.Module, ends: Sequence[Callable[[], None]], stack: contextlib.ExitStack
) -> None:
    """One pass over the weights at a time: all threads share the buffers that they come to.

    ``ends`` are called after every pass. Hooks would not do: torch calls none of them when an
    interrupt ends a pass.
    """
    inner, turn = model.forward, threading.RLock()

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with turn:
            try:
                return inner(*args, **kwargs)
            finally:
                for end in ends:
                    end()

    before = vars(model).get("forward")
    model.forward = forward
    if before is None:
        stack.callback(delattr, model, "forward")
    else:
        stack.callback(setattr, model, "forward", before)
