"""The recipes of docs/training.md, run as they are pasted, and once more without a tier."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import cxl_offload
from tests.docs.blocks import all_blocks

CXL_NODE, ELSEWHERE = 2, -1


def recipe(trainer: str) -> str:
    """The one block that makes this trainer."""
    (text,) = (each.text for each in all_blocks("python") if f" {trainer}(" in each.text)
    return text


def ran(text: str) -> dict[str, Any]:
    """The names that a recipe leaves; the draws are the same each time."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, "recipe", "exec"), names)
    return names


class Nowhere(contextlib.nullcontext[Any]):
    """Stands for both of the recipe's calls: nothing is offloaded."""

    use = None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(self)


def losses(names: dict[str, Any]) -> list[float]:
    return [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]


def assert_trains_alike_in_a_tier(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and activations were in the tier, and the losses are those without it."""
    text = recipe(trainer)
    ours = ran(text)
    assert ours["activations"].use.copies >= len(losses(ours)) > 2
    assert nodes_of_states(ours) == {CXL_NODE}
    for name in ("offload_optimizer", "offload_activations"):
        monkeypatch.setattr(cxl_offload, name, Nowhere)
    stock = ran(text)
    assert nodes_of_states(stock) == {ELSEWHERE}
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    assert losses(stock)[-1] != losses(stock)[0]


def nodes_of_states(names: dict[str, Any]) -> set[int]:
    """Of both states of every weight; ordinary memory is elsewhere."""
    weights = [each for each in names["model"].parameters() if each.requires_grad]
    found, states = set[int](), names["optimizer"].state
    assert len(states) == len(weights)
    for state in states.values():
        for name in ("exp_avg", "exp_avg_sq"):
            if names["session"].find(state[name].data_ptr()) is not None:
                place = cxl_offload.placement_of(state[name], session=names["session"])
                found |= place.granted.keys()
            else:
                found.add(ELSEWHERE)
    return found
