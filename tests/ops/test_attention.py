"""Decode attention against softmax in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.attention import (
    Partial,
    combine,
    decode_attention,
    decode_attention_partial,
    from_flexgen,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# With "avx512bf16" queries and keys of bfloat16 are multiplied as they are.
ISAS = [*_C.supported_isas(), *({"avx512bf16"} & {*_C.bf16_products()})]
ROUNDING = {F32: 2e-6, BF16: 2.0**-8, F16: 2.0**-11}


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attended: np.ndarray | None = None,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(batch, heads, dim) and the logarithm of the sums, in float64, without any trick."""
    queries, keys, values = (tensor.double().numpy() for tensor in (q, k, v))
    batch, heads, dim = queries.shape
    factor = 1 / math.sqrt(dim) if scale is None else scale
    out, sums = np.zeros(queries.shape), np.full((batch, heads), -math.inf)
    for b in range(batch):
        rows = np.arange(keys.shape[2]) if attended is None else np.nonzero(attended[b])[0]
        for h in range(heads):
            kv_head = h // (heads // keys.shape[1])
            with np.errstate(all="ignore"):
                scores = factor * (keys[b, kv_head, rows] @ queries[b, h])
                if len(rows) == 0 or np.all(scores == -math.inf):
                    continue
                weights = np.exp(scores - scores.max())
                out[b, h] = weights @ values[b, kv_head, rows] / weights.sum()
                sums[b, h] = scores.max() + np.log(weights.sum())
    return out, sums


def assert_close(found: torch.Tensor, expected: np.ndarray, dtype: torch.dtype = F32) -> None:
    np.testing.assert_allclose(
        found.double().numpy(), expected, rtol=ROUNDING[dtype] + 2e-6, atol=4e-6
    )


def draw(*shape: int, dtype: torch.dtype = F32, seed: int = 0, offset: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    base = torch.empty(math.prod(shape) + offset, dtype=dtype)
    view = base[offset:].view(shape)
    return view.copy_(torch.randn(shape, generator=source))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("dim", [1, 7, 16, 33, 64, 80])
@pytest.mark.parametrize("seq", [1, 3, 64, 67, 300])
def test_attention_follows_oracle_for_odd_sizes_and_offsets(
    isa: str, dtype: torch.dtype, dim: int, seq: int
) -> None:
    q = draw(2, 4, dim, dtype=dtype, seed=1, offset=1)
    k = draw(2, 2, seq, dim, dtype=dtype, seed=2, offset=3)
    v = draw(2, 2, seq, dim, dtype=dtype, seed=3, offset=5)
    assert_close(decode_attention(q, k, v, isa=isa), oracle(q, k, v)[0], dtype)


@pytest.mark.parametrize("heads", [1, 3, 8, 24])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_flexgen_layout_gives_same_bits_as_contiguous_copy(heads: int, dtype: torch.dtype) -> None:
    """Up to 127 positions: longer ones lie in streams there, which are read in turns."""
    q = draw(3, heads, 64, dtype=dtype)
    caches = [draw(127, 3 * heads, 64, dtype=dtype, seed=seed) for seed in (1, 2)]
    k, v = (from_flexgen(cache, 3) for cache in caches)
    assert k.data_ptr() == caches[0].data_ptr()
    found = decode_attention(q, k, v)
    assert torch.equal(found, decode_attention(q, k.contiguous(), v.contiguous()))
    assert_close(found, oracle(q, k, v)[0], dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("lengths", [[0, 5, 900], [1, 256, 257], [900, 900, 900]])
def test_ragged_lengths_and_grouped_queries_follow_oracle(
    kv_heads: int, lengths: list[int]
) -> None:
    q, k, v = draw(3, 6, 32), draw(3, kv_heads, 900, 32, seed=1), draw(3, kv_heads, 900, 32, seed=2)
    attended = np.arange(900) < np.array(lengths)[:, None]
    for row, length in enumerate(lengths):  # what lies behind a sequence is never read
        k[row, :, length:] = math.nan
        v[row, :, length:] = math.nan
    found = decode_attention_partial(q, k, v, lengths=torch.tensor(lengths))
    out, sums = oracle(q, k, v, attended)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("group", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("dim", [15, 40, 96, 136])
def test_queries_that_share_a_head_follow_oracle_each(
    isa: str, dtype: torch.dtype, group: int, dim: int
) -> None:
    q = draw(1, 2 * group, dim, dtype=dtype, offset=1)
    k, v = (draw(1, 2, 67, dim, dtype=dtype, seed=seed, offset=3) for seed in (1, 2))
    assert_close(decode_attention(q, k, v, isa=isa), oracle(q, k, v)[0], dtype)


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
def test_mask_and_window_hide_positions_even_with_nan(window: int | None) -> None:
    q, k, v = draw(2, 4, 40), draw(2, 2, 500, 40, seed=1), draw(2, 2, 500, 40, seed=2)
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[1] = False
    mask[1, 440] = True
    attended = mask.numpy() & (np.arange(500) >= 500 - (window or 500))
    for row in range(2):
        hidden = torch.from_numpy(~attended[row])
        k[row, :, hidden] = math.nan
        v[row, :, hidden] = math.inf
    found = decode_attention_partial(q, k, v, mask=mask, window=window)
    out, sums = oracle(q, k, v, attended)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


def test_paged_cache_follows_oracle_of_gathered_cache() -> None:
    q = draw(3, 8, 48, dtype=BF16)
    k, v = draw(40, 16, 2, 48, dtype=BF16, seed=1), draw(40, 16, 2, 48, dtype=BF16, seed=2)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    table = order[:36].view(3, 12).contiguous()
    lengths = [192, 17, 0]
    table[1, 2:] = -1  # beyond the sequence: not read
    safe = table.clamp(min=0).long()
    gathered = [cache[safe].flatten(1, 2).transpose(1, 2) for cache in (k, v)]
    attended = np.arange(192) < np.array(lengths)[:, None]
    found = decode_attention(q, k, v, block_table=table, lengths=lengths)
    assert_close(found, oracle(q, *gathered, attended)[0], BF16)
    table[1, 1] = 40
    with pytest.raises(ValueError, match="block 40"):
        decode_attention(q, k, v, block_table=table, lengths=lengths)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_nan_and_infinity_follow_oracle(
    isa: str, value: float, where: str, dtype: torch.dtype
) -> None:
    inputs = {
        "q": draw(2, 2, 24, dtype=dtype),
        "k": draw(2, 2, 70, 24, dtype=dtype, seed=1),
        "v": draw(2, 2, 70, 24, dtype=dtype, seed=2),
    }
    inputs[where][1, 1].view(-1)[3] = value
    assert_close(decode_attention(**inputs, isa=isa), oracle(**inputs)[0], dtype)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = draw(1, 2, 64) * 1000, draw(1, 2, 700, 64, seed=1), draw(1, 2, 700, 64, seed=2)
    np.testing.assert_allclose(
        decode_attention(q, k, v).double().numpy(), oracle(q, k, v)[0], rtol=2e-2, atol=2e-3
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bits_for_any_number_of_threads(threads: int) -> None:
    q, k, v = draw(1, 2, 64), draw(1, 1, 6000, 64, seed=1), draw(1, 1, 6000, 64, seed=2)
    assert torch.equal(
        decode_attention(q, k, v, threads=threads), decode_attention(q, k, v, threads=1)
    )


@pytest.mark.parametrize("cuts", [[0, 0, 1], [100, 101, 350], [400, 400, 400]])
def test_combined_parts_equal_the_whole(cuts: list[int]) -> None:
    q, k, v = draw(2, 4, 32), draw(2, 4, 400, 32, seed=1), draw(2, 4, 400, 32, seed=2)
    edges = [0, *cuts, 400]
    parts = [
        decode_attention_partial(q, k[:, :, a:b], v[:, :, a:b])
        for a, b in itertools.pairwise(edges)
    ]
    found = combine(parts)
    out, sums = oracle(q, k, v)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


def test_combining_nothing_attended_gives_zeros() -> None:
    nothing = Partial(torch.zeros(1, 2, 3), torch.full((1, 2), -math.inf))
    found = combine([nothing, nothing])
    assert torch.equal(found.out, nothing.out)
    assert torch.equal(found.log_sum_exp, nothing.log_sum_exp)
    with pytest.raises(ValueError, match="at least one"):
        combine([])


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty_inputs_give_empty_outputs(shape: tuple[int, int, int]) -> None:
    batch, heads, dim = shape
    cache = torch.empty(batch, heads, 5, dim)
    assert decode_attention(torch.empty(shape), cache, cache).shape == shape


BAD: dict[str, tuple[dict[str, object], str]] = {
    "q of two dimensions": ({"q": torch.zeros(4, 8)}, "batch, heads, dim"),
    "q of another dim": ({"q": torch.zeros(2, 4, 16)}, "heads of 16"),
    "heads no multiple": ({"q": torch.zeros(2, 3, 8)}, "no multiple"),
    "batches that differ": ({"q": torch.zeros(3, 4, 8)}, "2 sequences, q of 3"),
    "q of integers": ({"q": torch.zeros(2, 4, 8, dtype=torch.int32)}, "int32"),
    "q not contiguous": ({"q": torch.zeros(4, 2, 8).transpose(0, 1)}, "not contiguous"),
    "k of another type": ({"k": torch.zeros(2, 2, 10, 8, dtype=F16)}, "one type"),
    "v of another length": ({"v": torch.zeros(2, 2, 11, 8)}, "differ in shape"),
    "k of three dimensions": ({"k": torch.zeros(2, 20, 8)}, "four dimensions"),
    "k with strided rows": ({"k": torch.zeros(2, 2, 8, 10).transpose(2, 3)}, "stride of 10"),
    "length too great": ({"lengths": [3, 11]}, "length 11"),
    "length negative": ({"lengths": [3, -1]}, "length -1"),
    "too few lengths": ({"lengths": [3]}, "1 lengths for 2"),
    "fractional lengths": ({"lengths": [3.0, 2.0]}, "whole numbers"),
    "mask of numbers": ({"mask": torch.ones(2, 10)}, "torch.bool"),
    "mask too short": ({"mask": torch.ones(2, 9, dtype=torch.bool)}, "mask of 9"),
    "window of none": ({"window": 0}, "window 0"),
    "infinite scale": ({"scale": math.inf}, "finite"),
    "table without lengths": (
        {
            **dict.fromkeys(("k", "v"), torch.zeros(3, 10, 2, 8)),
            "block_table": torch.zeros(2, 1, dtype=torch.int32),
        },
        "needs the lengths",
    ),
    "unknown instructions": ({"isa": "neon"}, "neon"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises(case: str) -> None:
    good = {"q": torch.ones(2, 4, 8), "k": torch.ones(2, 2, 10, 8), "v": torch.ones(2, 2, 10, 8)}
    decode_attention(**good)
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        decode_attention(**{**good, **change})  # type: ignore[arg-type]
