"""Layers that compute the rows of a large batch in parts, one pass over their weights for all.

A decoder layer computes a few rows after the others instead of all at once, so that what it needs
beside weights and cache is of a few rows, and weights that lie far or are streamed are read once
for as many rows as the caches hold. FlexGen calls this its block schedule.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.masks import mask_part
from cxl_offload.integrations.transformers.room import KvMemory, RowPart

_RECORDED = ("output_attentions", "output_router_logits")
"""What hooks inside of a layer record, once a call of it; so those calls are for all rows."""


def take_layers(
    model: PreTrainedModel,
    rows_at_once: int,
    memory: KvMemory,
    stack: contextlib.ExitStack,
) -> int:
    """Let every decoder layer compute so many rows at once.

    ``forward`` of each is replaced, since nothing else stands between a model and its layers, and
    given back when ``stack`` closes.

    Returns
    -------
    int
        Layers that were taken.

    Raises
    ------
    ConfigError
        No decoder layer that follows transformers' conventions, or layers with states of their own.
    """
    kept = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if any(isinstance(each, LinearAttentionLayer) for each in kept):
        raise ConfigError(
            f"{type(model).__name__} keeps states that are not keys and values, of all rows at "
            "once; leave rows_at_once out"
        )
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers of transformers' own class, so their rows "
            "cannot be computed in parts; leave rows_at_once out"
        )
    for layer in layers:
        _take(layer, rows_at_once, memory, stack)
    return len(layers)


def _take(
    layer: torch.nn.Module, rows_at_once: int, memory: KvMemory, stack: contextlib.ExitStack
) -> None:
    before = vars(layer).get("forward")
    inner: Callable[..., Any] = layer.forward
    made = _forward(inner, rows_at_once, memory)
    layer.forward = types.MethodType(made, layer)
    if before is None:
        stack.callback(delattr, layer, "forward")
    else:
        stack.callback(setattr, layer, "forward", before)


def _forward(inner: Callable[..., Any], rows_at_once: int, memory: KvMemory) -> Callable[..., Any]:
    def forward(
        layer: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        total = hidden_states.shape[0]
        recorded = any(kwargs.get(name) for name in _RECORDED)
        if total <= rows_at_once or recorded or torch.is_grad_enabled():
            return inner(hidden_states, *args, **kwargs)
        made: torch.Tensor | None = None
        try:
            for begin in range(0, total, rows_at_once):
                part = RowPart(begin, min(begin + rows_at_once, total), total)
                memory.current.part = part
                given = [_of_part(each, part) for each in args]
                named = {name: _of_part(each, part) for name, each in kwargs.items()}
                out = inner(hidden_states[part.rows], *given, **named)
                if not isinstance(out, torch.Tensor):
                    raise ConfigError(
                        f"{type(layer).__name__} returns a {type(out).__name__} where layers of "
                        "transformers return hidden states; leave rows_at_once out"
                    )
                if made is None:
                    made = _whole(out, total, memory)
                made[part.rows] = out
        finally:
            memory.current.part = None
        return made

    return forward


def _whole(out: torch.Tensor, total: int, memory: KvMemory) -> torch.Tensor:
    """Hidden states of all rows, in the tier that has been asked for."""
    shape = (total, *out.shape[1:])
    if "activations" not in memory.store.parts or out.device.type != "cpu":
        return torch.empty(shape, dtype=out.dtype, device=out.device)
    made = memory.store.empty("activations", 0, shape, out.dtype, pin=False)
    memory.store.count(made, "activations", 0, made)
    return made


def _of_part(given: Any, part: RowPart) -> Any:
    """The rows of a part of what a layer is given for a batch; all else as it is.

    Of one dimension are counts and positions that all rows share.
    """
    if isinstance(given, tuple):
        return tuple(_of_part(each, part) for each in given)
    if isinstance(given, torch.Tensor) and given.dim() > 1 and given.shape[0] == part.total:
        return mask_part(given, part.begin, part.end) if given.dim() == 4 else given[part.rows]
    return given
