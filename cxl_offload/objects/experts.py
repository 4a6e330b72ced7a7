"""How an expert lies in a model's parameters: as a slice of a stack of all, or in its own.

transformers and vLLM stack what a layer's experts have alike, ``experts.down_proj`` of
``(experts, hidden, inner)``; checkpoints and older models have ``experts.7.down_proj.weight``. Who
places, moves or counts experts one by one asks here where they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_OWN = re.compile(r"(?:.*\.)?experts\.(\d+)\..+")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_STACK = re.compile(r"(?:.*\.)?experts\.[^.]+")


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """What one parameter holds of one expert.

    Attributes
    ----------
    layer
        Dotted name of the module that holds a layer's experts.
    expert
        Its number in the layer, from 0.
    name
        Dotted name of the parameter.
    weight
        A contiguous view of the parameter; nothing is copied.
    """

    layer: str
    expert: int
    name: str
    weight: torch.Tensor


def number_of_expert(name: str) -> int | None:
    """The expert that a parameter belongs to by its name; None for stacks and all others."""
    found = _OWN.fullmatch(name)
    return int(found.group(1)) if found else None


def stacked_experts(name: str, shape: tuple[int, ...]) -> int:
    """How many experts are stacked in a parameter of this dotted name; 0: it is no stack."""
    return shape[0] if len(shape) > 1 and _STACK.fullmatch(name) else 0


def expert_numbers(text: str) -> frozenset[int]:
    """The experts that ``"0-7,12"`` names.

    Raises
    ------
    ValueError
        No list of numbers and ranges, or a range that ends before it begins.
    """
    found: set[int] = set()
    for each in text.split(","):
        ends = _RANGE.fullmatch(each.strip())
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if last < first:
            raise ValueError(f"{text!r} names no experts; write numbers and ranges, as 0-7,12")
        found.update(range(first, last + 1))
    return frozenset(found)


def runs_of(numbers: Collection[int]) -> Iterator[tuple[int, int]]:
    """First number and end of every run of neighbours."""
    for number in sorted(numbers):
        if number - 1 not in numbers:
            end = number
            while end in numbers:
                end += 1
            yield number, end


def expert_parts(model: torch.nn.Module) -> Iterator[ExpertPart]:
    """Every part of every expert that the router of a layer chooses from, by layer and parameter.

    Shared experts are not among them: every token uses those.
    """
    for name, weight in model.named_parameters():
        layer = name[: name.rfind("experts.") + len("experts")]
        number = number_of_expert(name)
        if number is not None:
            yield ExpertPart(layer, number, name, weight.detach())
        else:
            for expert in range(stacked_experts(name, tuple(weight.shape))):
                yield ExpertPart(layer, expert, name, weight.detach()[expert])
