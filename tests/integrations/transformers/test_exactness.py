"""Attention of half precision that decodes is nearer to double precision than either stock one.

The kernel adds in single precision and rounds once, at the end; eager attention also rounds scores
and weights, and sdpa weights. Logits of whole models differ less and either way, because linear
layers round most: test_tokens.py holds them to a bound.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.attention import eager_attention_of, registered_name
from cxl_offload.integrations.transformers.masks import forms_of
from cxl_offload.memory import Session

from .models import FAMILIES, ONLY_EAGER, by_formula, generate, make
from .test_attention import BATCH, DIM, GROUPS, HEADS, Layer, ours

HALF = [torch.bfloat16, torch.float16]


def error(made: torch.Tensor, exact: torch.Tensor) -> float:
    return (made.double() - exact).abs().mean().item()


def states(dtype: torch.dtype, positions: int, queries: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(BATCH, HEADS, queries, DIM, generator=generator)
    keys, values = torch.randn(2, BATCH, GROUPS, positions, DIM, generator=generator)
    return [each.to(dtype) for each in (query, keys, values)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("positions", "queries"), [(50, 1), (300, 1), (2000, 1), (300, 4)])
def test_error_is_strictly_smaller_than_that_of_eager_and_of_sdpa(
    dtype: torch.dtype, positions: int, queries: int
) -> None:
    """With every seed; and it is all but that of rounding the exact result."""
    layer = Layer().eval()
    mask = torch.ones(BATCH, 1, queries, positions, dtype=torch.bool)
    mask[0, ..., :20] = False
    mask[1, ..., ::3] = False
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    for seed in range(10):
        given = states(dtype, positions, queries, seed)
        exact, _ = by_formula(layer, *(each.double() for each in given), mask)
        by_sdpa, _ = sdpa_attention_forward(layer, *given, mask)
        by_eager, _ = modeling_llama.eager_attention_forward(layer, *given, added, DIM**-0.5)
        made = error(ours(layer, *given, mask), exact)
        assert made < 0.95 * error(by_sdpa, exact)
        assert made < 0.6 * error(by_eager, exact)
        assert made < 1.01 * error(exact.to(dtype), exact)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_attends_nearer_to_double_in_every_family(
    family: str, dtype: torch.dtype, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer is given for a token, computed by all three and in double precision."""
    model = make(family, dtype)
    own = "eager" if family in ONLY_EAGER else "sdpa"
    name = registered_name(own)
    attend, errors = ALL_ATTENTION_FUNCTIONS[name], Counter[str]()

    def compared(
        module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        made, weights = attend(module, query, key, value, mask, **options)
        if query.shape[2] > 1:
            return made, weights
        whole = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool) if mask is None else mask
        double = (each.double() for each in (query, key, value))
        exact, _ = by_formula(module, *double, whole, **options)
        added = forms_of(whole).added(whole, query.dtype)
        eager = eager_attention_of(module)
        assert eager is not None
        errors["ours"] += error(made, exact)
        errors["eager"] += error(eager(module, query, key, value, added, **options)[0], exact)
        if own == "sdpa":
            by_sdpa, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
            errors["sdpa"] += error(by_sdpa, exact)
        return made, weights

    model.set_attn_implementation(own)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, compared)
    with offload(model, {"kv": "bind:2"}, session=session) as done:
        generate(model)
        assert done.calls.kernel >= 9 * model.config.num_hidden_layers
    assert 0 < errors["ours"] < errors["eager"]
    assert own == "eager" or errors["ours"] < errors["sdpa"]
