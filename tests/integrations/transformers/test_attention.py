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
    BlockAttention,
    registered_name,
    take_part,
)

from .models import by_formula

BATCH, HEADS, GROUPS, DIM = 3, 6, 2, 32


class Layer(nn.Module):
    """What models hand to their attention."""

    num_key_value_groups = HEADS // GROUPS
    is_causal = True

    # Where eager attention is looked for.
    __module__ = modeling_llama.__name__


def states(dtype: torch.dtype, positions: int = 50, queries: int = 1) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, the last two in a longer cache."""
    torch.manual_seed(0)
    cache = torch.randn(2, BATCH, GROUPS, positions + 13, DIM).to(dtype)
    query = torch.randn(BATCH, queries, HEADS, DIM).transpose(1, 2).to(dtype)
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

    if dtype is torch.float32:  # both add in it, in another order
        assert error(made) <= 1.01 * error(stock) + 1e-7
    else:
        assert error(made) < 0.95 * error(stock)


def _of_scores() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    return {
        "nothing": {},
        "soft cap": {"softcap": 2.0},
        "sinks": {"s_aux": torch.randn(HEADS, generator=generator)},
        "bias": {"position_bias": slopes[:, None, None] * torch.arange(50.0) / 9},
        "all": {"softcap": 2.0, "s_aux": torch.ones(HEADS), "position_bias": slopes[:, None, None]},
    }


def _by_query(queries: int) -> torch.Tensor:
    """Padding, and of several queries each sees up to itself in a window of 30."""
    at = torch.arange(50 - queries, 50)[:, None]
    seen = (torch.arange(50) <= at) & (torch.arange(50) > at - 30)
    return padding() & seen


@pytest.mark.parametrize("queries", [1, 5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", _of_scores())
def test_rules_for_scores_are_those_of_the_formula(
    what: str, dtype: torch.dtype, queries: int
) -> None:
    layer, block = Layer().eval(), BlockAttention()
    take_part(layer, block)
    given, mask, options = states(dtype, queries=queries), _by_query(queries), _of_scores()[what]
    exact, _ = by_formula(layer, *(each.double() for each in given), mask, scaling=0.4, **options)
    made = ours(layer, *given, mask, scaling=0.4, **options)
    assert (block.calls.kernel, block.calls.several) == (1, int(queries > 1))
    assert made.shape == (BATCH, queries, HEADS, DIM)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(made.double(), exact, rtol=2 * eps, atol=8 * eps)


def test_masks_of_numbers_and_of_heads_are_added() -> None:
    layer, block, given = Layer().eval(), BlockAttention(), states(torch.float32, queries=3)
    take_part(layer, block)
    for mask in (torch.randn(BATCH, HEADS, 3, 50), torch.rand(1, HEADS, 3, 50) < 0.7):
        stock, _ = sdpa_attention_forward(layer, *given, mask)
        torch.testing.assert_close(ours(layer, *given, mask), stock)
    assert block.calls.kernel == 2


def test_mask_that_is_written_to_between_calls_is_read_again() -> None:
    layer, given, mask = Layer().eval(), states(torch.float32), padding()
    first = ours(layer, *given, mask)
    mask[..., :30] = False
    stock, _ = sdpa_attention_forward(layer, *given, mask)
    made = ours(layer, *given, mask)
    torch.testing.assert_close(made, stock)
    assert not torch.equal(made, first)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_mask": torch.ones(1)}, "option head_mask"),
        ({"output_attentions": True}, "option output_attentions"),
        ({"dropout": 0.5}, "dropout"),
        ({"softcap": None, "sliding_window": 4, "use_cache": True, "head_mask": None}, ""),
    ],
)
def test_steps_aside_for_what_changes_the_result(options: dict[str, Any], why: str) -> None:
    layer, block = Layer().eval(), BlockAttention()
    take_part(layer, block)
    ours(layer, *states(torch.float32), None, **{"scaling": 0.2, **options}, own="eager")
    assert block.calls.own == ({why: 1} if why else {})
    assert block.calls.kernel == (0 if why else 1)


def test_many_queries_are_left_to_the_models_own_attention() -> None:
    layer, block = Layer().eval(), BlockAttention(few_queries=4)
    take_part(layer, block)
    given, mask = states(torch.float32, queries=5), _by_query(5)
    stock, _ = sdpa_attention_forward(layer, *given, mask)
    assert torch.equal(ours(layer, *given, mask), stock)
    assert (block.calls.kernel, block.calls.prompt) == (0, 1)


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
