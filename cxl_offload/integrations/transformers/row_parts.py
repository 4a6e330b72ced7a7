"""Layers that compute the rows of a large batch in parts, one pass over their weights for all.

A decoder layer computes a few rows after the others instead of all at once, so that what it needs
beside weights and cache is of a few rows, and weights that lie far or are streamed are read once
for as many rows as the caches hold. FlexGen calls this its block schedule.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.current_rows import RowPart
from cxl_offload.integrations.transformers.masks import mask_part
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.tier_states import on_device
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.equations.row_states import STATES

_RECORDED = ("output_attentions", "output_router_logits")
"""What hooks inside of a layer record, once a call of it; so those calls are for all rows."""


class WholeStates(Protocol):
    """Where hidden states of all rows are, of which a module computes a part after the other."""

    def rows(
        self, states: torch.Tensor, part: RowPart, result: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Those of a part, where the module computes; ``result`` is read next."""

    def whole(self, out: torch.Tensor, total: int) -> torch.Tensor:
        """Room for all rows of what a module makes of a part."""

    def keep(self, whole: torch.Tensor, part: RowPart, out: torch.Tensor, *, here: bool) -> None:
        """Take the result of a part to its rows."""


class StatesInPlace:
    """Hidden states where the module computes: on CPUs in the tier that was asked for.

    Parameters
    ----------
    store
        Has the policy of ``activations``; None: what a module makes stays where it was made.
    """

    def __init__(self, store: TierStore | None = None) -> None:
        self._store = store

    def rows(
        self, states: torch.Tensor, part: RowPart, result: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A view of them."""
        return states[part.rows]

    def whole(self, out: torch.Tensor, total: int) -> torch.Tensor:
        """Uninitialised, in the tier where there is one."""
        shape, store = (total, *out.shape[1:]), self._store
        if store is None or STATES not in store.parts or out.device.type != "cpu":
            return torch.empty(shape, dtype=out.dtype, device=out.device)
        made = store.empty(STATES, 0, shape, out.dtype, pin=False)
        store.count(made, STATES, 0, made)
        return made

    def keep(self, whole: torch.Tensor, part: RowPart, out: torch.Tensor, *, here: bool) -> None:
        """Copy it."""
        whole[part.rows] = out


def check_rows(
    rows_at_once: int | None, store: TierStore, model: PreTrainedModel, *, streamed: bool
) -> None:
    """Refuse rows in turn without what they need, and what only they need without them.

    Parameters
    ----------
    streamed
        Whether an accelerator computes that hidden states are copied to.

    Raises
    ------
    ConfigError
        Names the option.
    """
    if rows_at_once is not None and (type(rows_at_once) is not int or rows_at_once < 1):
        raise ConfigError(
            f"rows_at_once {rows_at_once!r}: a whole number of at least 1, or None for all"
        )
    if rows_at_once is not None and "kv" not in store.parts:
        raise ConfigError(
            f"rows_at_once {rows_at_once}: rows in turn need the cache in a tier; give a "
            "policy of kv, such as bind:ldram, or gpu:1,bind:ldram for all of it on the "
            "accelerator"
        )
    if STATES not in store.parts:
        return
    if rows_at_once is None:
        raise ConfigError(
            "a policy of activations is for hidden states of rows that are computed in parts; "
            "give rows_at_once, or leave the policy out"
        )
    away = next((each.device for each in model.parameters() if each.device.type != "cpu"), None)
    if away is not None and not streamed:
        raise ConfigError(
            f"a policy of activations: {type(model).__name__} is on {away}, and only accelerator= "
            "copies hidden states there; call model.cpu() and give accelerator, or leave the "
            "policy out"
        )


def take_layers(
    model: PreTrainedModel,
    rows_at_once: int,
    memory: KvMemory,
    stack: contextlib.ExitStack,
    states: StateStream | None = None,
) -> int:
    """Let every decoder layer compute so many rows at once.

    ``forward`` of each is replaced, since nothing else stands between a model and its layers, and
    given back when ``stack`` closes.

    Parameters
    ----------
    states
        Copies hidden states between a tier and the accelerator; None: they are where layers
        compute.

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
    whole = StatesInPlace(memory.store) if states is None else states
    for layer in layers:
        replace_forward(layer, _forward(rows_at_once, memory, whole), stack)
    return len(layers)


def replace_forward(
    module: torch.nn.Module, made: Callable[..., Any], stack: contextlib.ExitStack
) -> None:
    """Let a module compute by another function until the stack closes.

    What somebody put in its place since then stays, and what wraps it calls the module's own again.

    Parameters
    ----------
    made
        Called with what the module computed by before, the module, and what the module is given. A
        deep copy of the module shares it, and is given its own.
    """
    before, closed = vars(module).get("forward"), False
    is_bound = before is None or getattr(before, "__self__", None) is module
    function: Callable[..., Any] = type(module).forward
    if before is not None:
        function = before.__func__ if is_bound else before

    # Its signature, not its name: by that prefix_facts.py knows what is this package's.
    @functools.wraps(type(module).forward, assigned=("__doc__",), updated=())
    def forward(called: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What was bound to the module is bound to its copy in the copy, as deepcopy would do it.
        inner = types.MethodType(function, called) if is_bound else function
        return inner(*args, **kwargs) if closed else made(inner, called, *args, **kwargs)

    def close() -> None:
        nonlocal closed
        closed = True
        if vars(module).get("forward") is not ours:
            return
        if before is None:
            del module.forward
        else:
            module.forward = before

    ours = types.MethodType(forward, module)
    module.forward = ours
    stack.callback(close)


def _forward(rows_at_once: int, memory: KvMemory, states: WholeStates) -> Callable[..., Any]:
    def forward(
        inner: Callable[..., Any],
        layer: torch.nn.Module,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        total = hidden_states.shape[0]
        recorded = any(kwargs.get(name) for name in _RECORDED)
        if total <= rows_at_once or recorded or torch.is_grad_enabled():
            return inner(on_device(hidden_states), *args, **kwargs)
        made: torch.Tensor | None = None
        try:
            for part in parts_of(total, rows_at_once):
                memory.current.part = part
                given = [of_part(each, part) for each in args]
                named = {name: of_part(each, part) for name, each in kwargs.items()}
                out = inner(states.rows(hidden_states, part, made), *given, **named)
                if not isinstance(out, torch.Tensor):
                    raise ConfigError(
                        f"{type(layer).__name__} returns a {type(out).__name__} where layers of "
                        "transformers return hidden states; leave rows_at_once out"
                    )
                if made is None:
                    made = states.whole(out, total)
                states.keep(made, part, out, here=False)
        finally:
            memory.current.part = None
        return made

    return forward


def parts_of(total: int, rows_at_once: int) -> Iterator[RowPart]:
    """All rows, in turn."""
    for begin in range(0, total, rows_at_once):
        yield RowPart(begin, min(begin + rows_at_once, total), total)


def of_part(given: Any, part: RowPart) -> Any:
    """The rows of a part of what a module is given for a batch; all else as it is.

    Of one dimension are counts and positions that all rows share.
    """
    if isinstance(given, tuple):
        return tuple(of_part(each, part) for each in given)
    if isinstance(given, torch.Tensor) and given.dim() > 1 and given.shape[0] == part.total:
        return mask_part(given, part.begin, part.end) if given.dim() == 4 else given[part.rows]
    return given
