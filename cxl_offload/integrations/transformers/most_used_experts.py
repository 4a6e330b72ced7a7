"""Experts that are asked for often near, the others far, while a model computes.

The slice of an expert is moved by its pages, so that the model computes as before, with the same
bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.asked_experts import (
    asked_of_call,
    expert_layers,
    stacks_of,
)
from cxl_offload.integrations.transformers.router_counts import RouterCounts
from cxl_offload.memory import Session
from cxl_offload.tune import MostUsedParts, Slice, TuneOptions, near_and_far
from cxl_offload.tune.state_file import read_state, write_state

_SAVE_EVERY = 1000
"""Forward passes between two writes of the state."""


class MostUsedExperts:
    """Counts what experts are asked for and moves them between forward passes.

    Routers on an accelerator are not waited for: what they asked for is known a pass or more later.
    Biases and other small weights of experts stay where they are.

    Parameters
    ----------
    model
        With its experts in memory of the session already.
    session
        The session that the experts are in.
    near_bytes
        Room on the near tier for experts.
    options
        Budget and state file. Bytes of the budget may move between two forward passes, and never
        more than a hundredth of the bytes that were read.

    Attributes
    ----------
    parts
        Where every expert is, and what has moved.

    Raises
    ------
    ConfigError
        The model has no stacked experts in memory of the session, or the state file is damaged.
    """

    def __init__(
        self, model: nn.Module, session: Session, *, near_bytes: int, options: TuneOptions
    ) -> None:
        self._layers = expert_layers(model)
        slices: dict[str, list[Slice]] = {}
        for name, layer in self._layers.items():
            for number in range(layer.num_experts):
                found = [_slice(weight, number) for weight in stacks_of(layer)]
                slices[f"{name}.{number}"] = [
                    one for one in found if session.find(one.address) is not None
                ]
        if not slices or not all(slices.values()):
            raise ConfigError(
                f"near_expert_bytes: {type(model).__name__} has no stacked experts in tiers; name "
                "a policy for experts, such as bind:cxl, or leave near_expert_bytes out"
            )
        near, far = near_and_far(session.machine)
        try:
            self.parts = MostUsedParts(
                slices, near=near, far=far, room_bytes=near_bytes, session=session,
                budget_bytes_per_round=options.budget_bytes, framework="transformers",
            )  # fmt: skip
        except ValueError as reason:
            raise ConfigError(f"near_expert_bytes: {reason}") from None
        self._state = options.state
        saved = read_state(self._state)
        if saved is not None:
            self.parts.most_used.restore(saved)
        self._counts = RouterCounts(
            {name: layer.num_experts for name, layer in self._layers.items()}
        )
        self._passes = 0

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Counts and moves inside of the block."""
        hooks = [
            layer.register_forward_pre_hook(self._counter(name), with_kwargs=True)
            for name, layer in self._layers.items()
        ]
        hooks.append(model.register_forward_hook(self._after_forward))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._save()

    def _counter(self, name: str) -> Any:
        def count(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            asked = asked_of_call(args, kwargs)
            if asked is not None:
                self._counts.note(name, asked)

        return count

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        counts = self._counts.pass_ends()
        if counts is not None:
            self.parts.round(counts)
        self._passes += 1
        if self._passes % _SAVE_EVERY == 0:
            self._save()

    def _save(self) -> None:
        if self._state is not None:
            write_state(self._state, self.parts.most_used.saved())


def _slice(weight: torch.Tensor, number: int) -> Slice:
    one = weight.data[number]
    return Slice(one.data_ptr(), one.numel() * one.element_size())
