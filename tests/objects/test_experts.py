"""Where experts lie: each by itself, or as slices of a stack."""

from __future__ import annotations

import torch
from torch import nn

from cxl_offload.objects.experts import expert_parts, number_of_expert, stacked_experts


class Stacked(nn.Module):
    """What transformers makes of a layer's experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.arange(experts * 6.0).reshape(experts, 2, 3))
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, 3))


class Layer(nn.Module):
    """A router, experts and one that every token uses."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(3, 4)
        self.experts = experts
        self.shared_experts = nn.Linear(3, 3)


def test_every_expert_of_a_stack_is_a_view_of_its_own_bytes() -> None:
    model = nn.ModuleDict({"first": Layer(Stacked(4)), "second": Layer(Stacked(2))})
    parts = list(expert_parts(model))
    weight = model.get_parameter("first.experts.gate_up_proj")
    ours = [part for part in parts if part.name == "first.experts.gate_up_proj"]
    first = weight.data_ptr()
    assert [(part.layer, part.expert) for part in ours] == [("first.experts", n) for n in range(4)]
    spans = [(part.weight.data_ptr(), part.weight.nbytes) for part in ours]
    assert spans == [(first + n * 24, 24) for n in range(4)]
    ours[2].weight.fill_(-7)
    assert (weight == -7).sum() == 6
    assert weight[2].eq(-7).all()
    whole = sum(part.weight.nbytes for part in parts)
    assert whole == sum(
        weight.nbytes for name, weight in model.named_parameters() if ".experts." in name
    )


def test_experts_with_parameters_of_their_own_are_found_by_number() -> None:
    model = Layer(nn.ModuleList(nn.Linear(3, 3) for _ in range(11)))
    parts = list(expert_parts(model))
    assert {part.expert for part in parts} == set(range(11))
    assert len(parts) == 22
    weight = model.get_parameter("experts.10.weight")
    assert [p.weight.data_ptr() for p in parts if p.name == "experts.10.weight"] == [
        weight.data_ptr()
    ]
    assert {part.layer for part in parts} == {"experts"}


def test_names_tell_experts_from_what_every_token_uses() -> None:
    assert number_of_expert("model.layers.3.mlp.experts.17.down_proj.weight") == 17
    assert number_of_expert("model.layers.3.mlp.shared_experts.0.down_proj.weight") is None
    assert number_of_expert("model.layers.3.mlp.experts.down_proj") is None
    assert stacked_experts("model.layers.3.mlp.experts.down_proj", (8, 4, 2)) == 8
    assert stacked_experts("model.layers.3.mlp.experts.scale", (8,)) == 0
    assert stacked_experts("model.layers.3.mlp.experts.7.up_proj.weight", (8, 4)) == 0
    assert stacked_experts("model.layers.3.mlp.shared_experts.up_proj", (8, 4)) == 0
