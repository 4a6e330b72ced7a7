"""Deep copies of a model that is in a block: the copy is as the model was before the block."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError

_COPY = "__deepcopy__"
_TENSORS = frozenset({"_parameters", "_buffers", "_modules"})
_NOTHING = object()

Facts = dict[str, Any]
"""Of a module, by attribute: keys where it is a dictionary, as those of hooks are, else itself."""


class PlainCopies:
    """Lets ``copy.deepcopy(model)`` make a model that a block has no part in.

    A block puts hooks and functions into a model and takes them out when it ends. A copy would keep
    them for ever, and some of them know the first model's cache, prefixes and layers.

    Parameters
    ----------
    model
        As it is before the block puts anything into it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._before = {module: _facts(module) for module in model.modules()}
        self._put: dict[nn.Module, dict[str, tuple[Any, Any]]] = {}

    def begin(
        self, stack: contextlib.ExitStack, restore: Callable[[PreTrainedModel], None], why_not: str
    ) -> None:
        """All that the block puts into the model is in it; until ``stack`` closes.

        Parameters
        ----------
        restore
            Undoes in a copy what is no attribute of a module.
        why_not
            Why the model cannot be copied in this block, to end the line of the error; empty: it
            can.
        """
        for module, before in self._before.items():
            put = {
                name: (fact, before.get(name, _NOTHING))
                for name, fact in _facts(module).items()
                if not _same(fact, before.get(name, _NOTHING))
            }
            if put:
                self._put[module] = put

        def deep_copy(memo: dict[int, Any]) -> PreTrainedModel:
            if why_not:
                raise ConfigError(f"a model cannot be copied in its offload() block: {why_not}")
            made = self._copied(memo)
            restore(made)
            return made

        self._before = {}
        setattr(self._model, _COPY, deep_copy)
        stack.callback(delattr, self._model, _COPY)

    def _copied(self, memo: dict[int, Any]) -> PreTrainedModel:
        for module, put in self._put.items():
            for name, (fact, before) in put.items():
                for ours in _put_there(module, name, fact, before):
                    memo[id(ours)] = ours  # not copied with all that it knows, but taken out below
        make, args, state = self._model.__reduce_ex__(4)[:3]
        made = make(*args)
        memo[id(self._model)] = made
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _COPY}
        made.__setstate__(copy.deepcopy(state, memo))
        for module, put in self._put.items():
            twin = memo.get(id(module))
            if isinstance(twin, nn.Module):
                for name, (fact, before) in put.items():
                    if _put_there(module, name, fact, before):
                        _take_out(twin, name, fact, before, memo)
        return made


def _facts(module: nn.Module) -> Facts:
    return {
        name: frozenset(value) if isinstance(value, dict) else value
        for name, value in vars(module).items()
        if name not in _TENSORS
    }


def _same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, frozenset) else one is other


def _put_there(module: nn.Module, name: str, fact: Any, before: Any) -> list[Any]:
    """What a block put into an attribute, of that which is still there."""
    now = vars(module).get(name, _NOTHING)
    if isinstance(now, Mapping) and isinstance(fact, frozenset):
        return [now[key] for key in fact - _keys(before) if key in now]
    return [now] if now is fact else []


def _keys(before: Any) -> frozenset[Any]:
    return before if isinstance(before, frozenset) else frozenset()


def _take_out(twin: nn.Module, name: str, fact: Any, before: Any, memo: dict[int, Any]) -> None:
    if isinstance(fact, frozenset):
        for key in fact - _keys(before):
            vars(twin)[name].pop(key, None)
    elif before is _NOTHING:
        vars(twin).pop(name, None)
    else:
        vars(twin)[name] = copy.deepcopy(before, memo)
