"""Decode attention over caches of 8-bit floats against softmax in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cxl_offload.ops.attention import decode_attention, decode_attention_partial, from_flexgen
from tests.ops.test_attention import ISAS, assert_close, draw, oracle

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2])


def every_code(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)


@BOTH
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [1, 5, 16, 40])
def test_every_code_is_worth_what_torch_says(isa: str, dtype: torch.dtype, dim: int) -> None:
    """One position a sequence, so that what comes out are its values: also NaN and subnormals."""
    codes = every_code(dtype)
    v = codes[:, None].expand(256, dim).reshape(256, 1, 1, dim).contiguous()
    k = torch.zeros(256, 1, 1, dim).to(dtype)
    found = decode_attention(torch.ones(256, 1, dim), k, v, isa=isa)
    expected = codes.float()[:, None].expand(256, dim)
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=0, equal_nan=True)
    # As keys: infinite scores attend to nothing, or are no numbers.
    sums = decode_attention_partial(torch.ones(256, 1, dim), v, k, scale=1.0, isa=isa).log_sum_exp
    scores = (codes.double() * dim).numpy()
    scores[scores == math.inf] = math.nan  # inf - inf
    np.testing.assert_allclose(sums[:, 0].double().numpy(), scores, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [1, 7, 16, 33, 80, 128])
@pytest.mark.parametrize("seq", [1, 67, 300])
def test_attention_follows_oracle_for_odd_sizes_and_offsets(
    isa: str, dtype: torch.dtype, dim: int, seq: int
) -> None:
    q = draw(2, 4, dim, seed=1, offset=1)
    k = draw(2, 2, seq, dim, dtype=dtype, seed=2, offset=3)
    v = draw(2, 2, seq, dim, dtype=dtype, seed=3, offset=5)
    assert_close(decode_attention(q, k, v, isa=isa), oracle(q, k, v)[0])


@BOTH
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_follow_oracle(
    isa: str, dtype: torch.dtype, where: str, value: float
) -> None:
    inputs = {
        "q": draw(2, 2, 24),
        "k": draw(2, 2, 70, 24, dtype=dtype, seed=1),
        "v": draw(2, 2, 70, 24, dtype=dtype, seed=2),
    }
    inputs[where][1, 1, 3, 3] = value  # e4m3 has no infinity: torch makes it NaN
    assert_close(decode_attention(**inputs, isa=isa), oracle(**inputs)[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [5, 64, 80, 129])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_is_found_wherever_it_lies_in_a_row(isa: str, dim: int, code: int) -> None:
    """Rows without one are read in a cheaper way: each has it elsewhere, one has none."""
    v = draw(dim + 1, 1, 1, dim, dtype=E4M3)
    v.view(torch.uint8)[range(dim), 0, 0, range(dim)] = code
    k = torch.zeros(dim + 1, 1, 1, dim).to(E4M3)
    found = decode_attention(torch.ones(dim + 1, 1, dim), k, v, isa=isa)[:, 0]
    torch.testing.assert_close(found, v[:, 0, 0].float(), rtol=0, atol=0, equal_nan=True)
    scores = decode_attention_partial(torch.ones(dim + 1, 1, dim), v, k, isa=isa).log_sum_exp
    assert scores.isnan().flatten().tolist() == [True] * dim + [False]


@BOTH
def test_scales_multiply_the_caches_of_their_heads(dtype: torch.dtype) -> None:
    q, k, v = (
        draw(3, 6, 32),
        draw(3, 2, 90, 32, dtype=dtype, seed=1),
        draw(3, 2, 90, 32, dtype=dtype, seed=2),
    )
    k_scale, v_scale = torch.tensor([0.25, 3.0]), torch.tensor([-7.0, 0.01])
    scaled = [
        cache.double() * scale.double()[:, None, None]
        for cache, scale in ((k, k_scale), (v, v_scale))
    ]
    found = decode_attention_partial(q, k, v, k_scale=k_scale, v_scale=v_scale)
    out, sums = oracle(q, *scaled)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)
    for one in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        found = decode_attention_partial(q, k, v, k_scale=one, v_scale=one)
        assert_close(found.out, oracle(q, k.double() * 0.5, v.double() * 0.5)[0])


@BOTH
def test_lengths_mask_window_and_flexgen_layout_hide_positions(dtype: torch.dtype) -> None:
    q = draw(2, 4, 40)
    k, v = (from_flexgen(draw(500, 8, 40, dtype=dtype, seed=seed), 2) for seed in (1, 2))
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(5)) < 0.5
    lengths = np.array([500, 333])[:, None]
    at = np.arange(500)
    attended = mask.numpy() & (at < lengths) & (at >= lengths - 100)
    for row in range(2):
        hidden = torch.from_numpy(~attended[row])
        for cache in (k, v):
            cache[row].view(torch.uint8)[:, hidden] = 0x7F  # NaN in both formats
    found = decode_attention_partial(q, k, v, mask=mask, window=100, lengths=[500, 333])
    out, sums = oracle(q, k, v, attended)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


@BOTH
def test_paged_cache_follows_oracle_of_gathered_cache(dtype: torch.dtype) -> None:
    q = draw(2, 8, 48)
    k, v = (draw(9, 16, 2, 48, dtype=dtype, seed=seed) for seed in (1, 2))
    table = torch.tensor([[8, 0, 3], [5, 7, -1]], dtype=torch.int32)
    lengths = [48, 17]
    gathered = [
        cache.view(torch.uint8)[table.clamp(min=0).long()].flatten(1, 2).transpose(1, 2).view(dtype)
        for cache in (k, v)
    ]
    attended = np.arange(48) < np.array(lengths)[:, None]
    found = decode_attention(q, k, v, block_table=table, lengths=lengths)
    assert_close(found, oracle(q, *gathered, attended)[0])


BAD: dict[str, tuple[dict[str, object], str]] = {
    "q of 8 bits": ({"q": torch.zeros(2, 4, 8).to(E4M3)}, "float8_e4m3fn"),
    "caches of two formats": ({"k": torch.zeros(2, 2, 10, 8).to(E5M2)}, "one type"),
    "too many scales": ({"k_scale": torch.ones(3)}, "3 scales"),
    "scale of a table": ({"v_scale": torch.ones(2, 2)}, "v_scale of shape"),
    "scale of integers": ({"v_scale": torch.ones(2, dtype=torch.int32)}, "v_scale of shape"),
    "infinite scale": ({"k_scale": math.inf}, "not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises(case: str) -> None:
    cache = torch.ones(2, 2, 10, 8).to(E4M3)
    good: dict[str, object] = {"q": torch.ones(2, 4, 8), "k": cache, "v": cache}
    decode_attention(**good)  # type: ignore[arg-type]
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        decode_attention(**{**good, **change})  # type: ignore[arg-type]
