"""Attention that multiplies queries and keys of bfloat16 as they are, beside float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.attention import decode_attention, decode_attention_partial

BF16 = torch.bfloat16
HAS_PRODUCTS = "avx512bf16" in _C.bf16_products()
PRODUCTS = ("avx512", "avx512bf16")
needs_products = pytest.mark.skipif(not HAS_PRODUCTS, reason="no AVX512-BF16 here")


def rules(choose: random.Random, batch: int, heads: int, queries: int, seq: int) -> dict[str, Any]:
    """Some of what scores depend on."""
    of_query = (queries, seq) if queries > 1 else (seq,)
    all_rules = {
        "lengths": [choose.randint(0, seq) for _ in range(batch)],
        "window": choose.randint(1, seq),
        "soft_cap": choose.choice([1.0, 30.0]),
        "scale": choose.choice([0.0, 1.0, 0.3, -2.0]),
        "mask": torch.rand(batch, seq) < 0.7,
        "bias": torch.randn(batch, heads, *of_query),
    }
    return {name: rule for name, rule in all_rules.items() if choose.random() < 0.3}


@needs_products
@pytest.mark.parametrize("seed", range(40))
def test_products_of_bfloat16_follow_float32_under_every_rule(seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, seq = choose.randint(1, 3), choose.choice([1, 2, 5]), choose.randint(1, 700)
    heads, queries = kv_heads * choose.choice([1, 2, 3, 4, 5, 9]), choose.choice([1, 1, 2, 5])
    dim = choose.choice([1, 15, 16, 31, 32, 33, 48, 64, 80, 128, 130, 300])
    q = torch.randn(batch, heads, *((queries,) if queries > 1 else ()), dim).to(BF16)
    k, v = (torch.randn(batch, seq, kv_heads, dim).to(BF16).transpose(1, 2) for _ in range(2))
    if choose.random() < 0.5:
        k, v = k.contiguous(), v.contiguous()
    given = rules(choose, batch, heads, queries, seq)
    expected = decode_attention_partial(q, k, v, isa="avx512", **given)
    found = decode_attention_partial(q, k, v, isa="avx512bf16", **given)
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found.log_sum_exp, expected.log_sum_exp, rtol=1e-5, atol=1e-4)
    alone = decode_attention_partial(q, k, v, isa="avx512bf16", threads=1, **given)
    assert torch.equal(alone.out, found.out)


@needs_products
def test_subnormal_keys_count_only_without_products_of_bfloat16() -> None:
    q, k = torch.full((1, 1, 1), 2.0**120).to(BF16), torch.zeros(1, 1, 2, 1).to(BF16)
    k[0, 0, 1] = 2.0**-130
    v = torch.tensor([0.0, 1.0]).to(BF16).view(1, 1, 2, 1)
    found = {isa: decode_attention(q, k, v, scale=2.0**7, isa=isa) for isa in PRODUCTS}
    assert found["avx512bf16"].item() == 0.5
    assert found["avx512"].item() > 0.52


@needs_products
@pytest.mark.parametrize("scale", [0.0, 1e-36, -1e-36, 0.75e-36])
@pytest.mark.parametrize("number", [1e20, 1e18])
def test_products_that_only_the_scale_makes_small_do_not_overflow(
    scale: float, number: float
) -> None:
    q, k = torch.full((1, 1, 32), number).to(BF16), torch.full((1, 1, 4, 32), number).to(BF16)
    v = torch.ones(1, 1, 4, 32).to(BF16)
    found = [decode_attention_partial(q, k, v, scale=scale, isa=isa) for isa in PRODUCTS]
    assert all(torch.equal(each.out, torch.ones(1, 1, 32)) for each in found)
    torch.testing.assert_close(found[1].log_sum_exp, found[0].log_sum_exp)


@pytest.mark.skipif(HAS_PRODUCTS, reason="AVX512-BF16 is here")
def test_products_that_the_processor_lacks_are_refused() -> None:
    q, k = torch.zeros(1, 1, 8).to(BF16), torch.zeros(1, 1, 2, 8).to(BF16)
    with pytest.raises(ValueError, match="'avx512bf16': this processor has no AVX512-BF16"):
        decode_attention(q, k, k, isa="avx512bf16")


@needs_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_computed_as_without_products(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(1, 2, 40).to(dtype), *(torch.randn(1, 2, 9, 40).to(dtype) for _ in "kv")
    found = [decode_attention(q, k, v, isa=isa) for isa in PRODUCTS]
    assert torch.equal(*found)
