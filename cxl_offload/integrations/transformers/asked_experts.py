"""The experts of a mixture in a model of transformers, and which of them a call asks for.

transformers keeps the experts of a layer in a module of their own, in weights with an expert in
each slice of the first dimension, and gives that module what the router has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cxl_offload.plan.equations.experts import leaves_an_expert

_ASKED = ("top_k_index", 1)
"""Name and position of the argument that says which experts each token asks for."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_ONLY_ASKED = frozenset({"eager", "batched_mm", "grouped_mm"})
"""Implementations of transformers that read no expert that nobody asks for."""


def expert_layers(model: nn.Module) -> dict[str, Any]:
    """The modules of a model that hold stacked experts, by their dotted names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "num_experts", None), int) and stacks_of(module)
    }


def stacks_of(layer: Any) -> list[nn.Parameter]:
    """Weights of a layer of experts with one expert in each slice, as contiguous rows."""
    return [
        weight
        for weight in layer.parameters(recurse=False)
        if weight.dim() == 3 and weight.shape[0] == layer.num_experts and weight.is_contiguous()
    ]


def experts_per_token(config: Any) -> int | None:
    """How many experts of a layer a token asks for; None where the configuration has no word."""
    found = getattr(config, "num_experts_per_tok", None)
    return found if isinstance(found, int) else None


def asked_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What a call of a layer of experts asks for: integers of any shape, on the router's device.

    None where the layer is given something else.
    """
    word, position = _ASKED
    asked = kwargs.get(word, args[position] if len(args) > position else None)
    numbers = isinstance(asked, torch.Tensor) and asked.dtype in _INTEGERS
    return asked if numbers else None


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The experts of one layer, and who calls them.

    Attributes
    ----------
    module
        Holds the weights.
    caller
        The module that it is a part of.
    weights
        Stacks, each with an expert in every slice.
    per_token
        Experts that a token asks for; None: not known.
    """

    module: Any
    caller: nn.Module
    weights: tuple[torch.Tensor, ...]
    per_token: int | None

    @property
    def count(self) -> int:
        """Experts."""
        return int(self.weights[0].shape[0])

    @property
    def reads_only_asked(self) -> bool:
        """Whether no expert is read that the layer was not called for.

        Another implementation of the experts, or a ``forward`` that somebody has put in place of
        the model's, may read all of them, and without a call that says which.
        """
        config = getattr(self.module, "config", None)
        known = getattr(config, "_experts_implementation", None) in _ONLY_ASKED
        decorated = hasattr(self.module, "has_gate")  # by transformers, which asks the config then
        replaced = any("forward" in vars(each) for each in (self.module, self.caller))
        return known and decorated and not replaced

    def one_by_one(self, tokens: float) -> bool:
        """Whether experts are copied when they are asked for: so many tokens leave one out."""
        if self.per_token is None or not self.reads_only_asked:
            return False
        return leaves_an_expert(self.count, self.per_token, tokens)

    def numbers(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int]:
        """The experts that a call asks for; waits for the router.

        All where the call does not say, or gives the number of no expert: ranks that divide the
        experts mark those of others so, and ``batched_mm`` reads the last one for it.
        """
        asked = asked_of_call(args, kwargs)
        if asked is None:
            return self.all
        found = frozenset(asked.flatten().tolist())
        return found if found <= self.all else self.all

    @property
    def all(self) -> frozenset[int]:
        """Numbers of the experts."""
        return frozenset(range(self.count))


def stacked_experts_in(
    layer: nn.Module, weights: frozenset[torch.Tensor], per_token: int | None
) -> tuple[StackedExperts, ...]:
    """The experts in a decoder layer whose stacks are all among these weights."""
    made: list[StackedExperts] = []
    for caller in layer.modules():
        for module in caller.children():
            if not isinstance(getattr(module, "num_experts", None), int):
                continue
            stacks = tuple(stacks_of(module))
            if stacks and weights.issuperset(stacks):
                made.append(StackedExperts(module, caller, stacks, per_token))
    return tuple(made)
