"""The registered attention by itself: as exact as the stock ones, and when it steps aside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from cxl_offload.integrations.transformers.attention import (
    AttentionCalls,
    count_in,
    registered_name,
)

BATCH, HEADS, GROUPS, DIM = 3, 6, 2, 32


class Layer(nn.Module):
    """What models hand to their attention."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True

    # Where eager attention is looked for.
    __module__ = modeling_llama.__name__


def states(dtype: torch.dtype, positions: int = 50) -> tuple[torch.Tensor, ...]:
    """Query, keys and values, the last two in a longer cache."""
    torch.manual_seed(0)
    cache = torch.randn(2, BATCH, GROUPS, positions + 13, DIM).to(dtype)
    query = torch.randn(BATCH, HEADS, 1, DIM).to(dtype)
    return query, cache[0, :, :, :positions], cache[1, :, :, :positions]


def padding(positions: int = 50) -> torch.Tensor:
    mask = torch.ones(BATCH, 1, 1, positions, dtype=torch.bool)
    mask[0, ..., :20] = False
    mask[1, ..., ::3] = False
    return mask


def ours(layer: Layer, *args: Any, own: str = "sdpa", **options: Any) -> torch.Tensor:
    made = ALL_ATTENTION_FUNCTIONS[registered_name(own)](layer, *args, **options)
    return made[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("mask", [None, padding()], ids=["all", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_is_nearer_to_double_than_stock(
    dtype: torch.dtype, mask: torch.Tensor | None, scaling: float | None
) -> None:
    layer, given = Layer(), states(dtype)
    exact, _ = sdpa_attention_forward(
        layer, *(each.double() for each in given), mask, scaling=scaling
    )
    stock, _ = sdpa_attention_forward(layer, *given, mask, scaling=scaling)
    made = ours(layer, *given, mask, scaling=scaling)
    assert made.shape == stock.shape
    assert made.dtype == dtype

    def error(result: torch.Tensor) -> float:
        return (result.double() - exact).abs().mean().item()

    assert error(made) <= 1.01 * error(stock) + 1e-7


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"softcap": 5.0}, "option softcap"),
        ({"s_aux": torch.ones(HEADS)}, "option s_aux"),
        ({"dropout": 0.5}, "dropout"),
        ({"softcap": None, "sliding_window": 4, "use_cache": True}, ""),
    ],
)
def test_steps_aside_for_what_changes_the_result(options: dict[str, Any], why: str) -> None:
    layer, calls = Layer(), AttentionCalls()
    layer.training = False
    count_in(layer, calls)
    ours(layer, *states(torch.float32), None, **{"scaling": 0.2, **options}, own="eager")
    assert calls.own == ({why: 1} if why else {})
    assert calls.kernel == (0 if why else 1)


def test_steps_aside_for_numbers_added_to_scores() -> None:
    layer, given = Layer(), states(torch.float32)
    bias = torch.randn(BATCH, 1, 1, 50)
    stock, _ = sdpa_attention_forward(layer, *given, bias)
    assert torch.equal(ours(layer, *given, bias), stock)


def test_eager_is_given_the_mask_as_numbers_when_it_steps_in() -> None:
    layer, given = Layer(), states(torch.float32)
    least = torch.finfo(torch.float32).min
    added = torch.zeros(BATCH, 1, 1, 50).masked_fill(~padding(), least)
    layer.training = False
    stock, _ = modeling_llama.eager_attention_forward(layer, *given, added, 0.2)
    query = given[0].requires_grad_()
    made = ours(layer, query, *given[1:], padding(), scaling=0.2, own="eager")
    torch.testing.assert_close(made, stock)
    assert made.requires_grad
