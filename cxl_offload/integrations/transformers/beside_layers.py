"""Embeddings, norms and heads that compute rows in parts, where hidden states lie in a tier.

What finds the hidden states of all rows, and what reads those of the last layer, would have all of
them on the accelerator at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.integrations.transformers.row_parts import (
    StatesInPlace,
    of_part,
    parts_of,
    replace_forward,
)
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.tier_states import on_device


def take_beside_layers(
    model: PreTrainedModel, states: StateStream, stack: contextlib.ExitStack
) -> None:
    """Let what finds and reads hidden states compute as many rows at once as the layers do.

    What it makes goes to the tier; logits, which are what a model returns, are on the accelerator.
    """
    head = model.get_output_embeddings()
    for module in beside_layers(model):
        if module is not head:
            replace_forward(module, _to_tier(module, states), stack)
    if head is not None:
        replace_forward(head, _to_device(states), stack)


def beside_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with weights that are used before or after the layers, one after the other."""
    lists = [each for each in model.modules() if any(_is_layer(part) for part in each.children())]
    for parent in model.modules():
        beside = list(parent.children())
        if any(each in lists for each in beside):
            for each in beside:
                has_layers = any(_is_layer(part) for part in each.modules())
                if not has_layers and any(True for _ in each.parameters()):
                    yield each


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


def _to_tier(module: nn.Module, states: StateStream) -> Callable[..., Any]:
    here = module in states.on_host

    def forward(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        total = _rows(args)
        if total <= states.rows_at_once:
            return inner(*map(on_device, args), **kwargs)
        made: torch.Tensor | None = None
        for part in parts_of(total, states.rows_at_once):
            given = [of_part(each, part) for each in args[1:]]
            named = {name: of_part(each, part) for name, each in kwargs.items()}
            out = inner(states.rows(args[0], part), *given, **named)
            if not isinstance(out, torch.Tensor) or out.shape[0] != part.end - part.begin:
                return inner(*map(on_device, args), **kwargs)  # not one of every row
            if made is None:
                made = states.whole(out, total)
            states.keep(made, part, out, here=here)
        return made

    return forward


def _to_device(states: StateStream) -> Callable[..., Any]:
    there = StatesInPlace()

    def forward(inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        total = _rows(args)
        if total <= states.rows_at_once:
            return inner(*map(on_device, args), **kwargs)
        made: torch.Tensor | None = None
        for part in parts_of(total, states.rows_at_once):
            out = inner(states.rows(args[0], part), *args[1:], **kwargs)
            if made is None:
                made = there.whole(out, total)
            there.keep(made, part, out, here=False)
        return made

    return forward


def _rows(args: tuple[Any, ...]) -> int:
    """Of the batch that a module is given; 0: it is given none."""
    given = args[0] if args else None
    return given.shape[0] if isinstance(given, torch.Tensor) and given.dim() > 1 else 0
