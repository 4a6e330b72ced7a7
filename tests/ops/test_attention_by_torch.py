"""Attention over a part by torch's operators against the formula in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from cxl_offload.ops import attention_by_torch
from cxl_offload.ops.attention import combine, decode_attention, decode_attention_partial
from cxl_offload.ops.attention_by_torch import ScoreOptions, partial_by_torch


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the formula, in double precision: result and log-sum-exp."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(groups, dim=1) for each in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    if options.soft_cap is not None:
        scores = options.soft_cap * (scores / options.soft_cap).tanh()
    if options.bias is not None:
        scores = scores + options.bias.double()
    if options.mask is not None:
        scores = scores.masked_fill(~options.mask, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v, scores.logsumexp(-1)


MASK = torch.rand(2, 1, 3, 37, generator=torch.Generator().manual_seed(1)) < 0.7
MASK[0, 0, 1] = False  # a query that sees nothing
OPTIONS = {
    "plain": ScoreOptions(),
    "scale": ScoreOptions(scale=0.7),
    "cap": ScoreOptions(soft_cap=1.5),
    "mask": ScoreOptions(mask=MASK),
    "bias": ScoreOptions(bias=draw(1, 4, 1, 37, seed=3)),
    "all": ScoreOptions(scale=0.3, soft_cap=2.0, mask=MASK, bias=draw(2, 1, 3, 37, seed=4)),
}


@pytest.mark.parametrize("copied", [1, 1000, 1 << 26])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", OPTIONS)
def test_part_follows_the_formula_however_many_positions_are_taken_at_once(
    case: str, kv_heads: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_by_torch, "_MOST_COPIED_BYTES", copied)
    q = draw(2, 4, 3, 8, seed=5)
    k, v = draw(2, kv_heads, 37, 8, seed=6), draw(2, kv_heads, 37, 8, seed=7)
    found = partial_by_torch(q, k, v, OPTIONS[case])
    out, sums = expected(q, k, v, OPTIONS[case])
    assert found.out.dtype is found.log_sum_exp.dtype is torch.float32
    torch.testing.assert_close(found.out.double(), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_sum_exp.double(), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_small_types_are_read_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    q = draw(2, 4, 1, 8, seed=5).bfloat16()
    k, v = draw(2, 2, 19, 8, seed=6).to(dtype), draw(2, 2, 19, 8, seed=7).to(dtype)
    found = partial_by_torch(q, k, v, ScoreOptions())
    out, sums = expected(q, k.float(), v.float(), ScoreOptions())
    torch.testing.assert_close(found.out.double(), out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_sum_exp.double(), sums, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 18, 36, 37])
def test_parts_of_torch_and_of_the_kernel_join_to_the_whole(cut: int) -> None:
    q = draw(2, 4, 8, seed=5)
    k, v = draw(2, 2, 37, 8, seed=6), draw(2, 2, 37, 8, seed=7)
    head = partial_by_torch(q.unsqueeze(2), k[:, :, :cut], v[:, :, :cut], ScoreOptions())
    tail = decode_attention_partial(q.unsqueeze(2), k[:, :, cut:], v[:, :, cut:], causal=False)
    joined = combine([head, tail])
    torch.testing.assert_close(joined.out[:, :, 0], decode_attention(q, k, v), atol=1e-6, rtol=0)
    if 0 < cut < 37:  # the control: without their weights the parts are not the whole
        even = (head.out + tail.out) / 2
        assert not torch.allclose(even[:, :, 0], joined.out[:, :, 0], atol=1e-2)


def test_autocast_does_not_round_what_is_joined() -> None:
    q, k, v = (draw(1, 2, count, 8, seed=count) for count in (1, 30, 31))
    plain = partial_by_torch(q, k, v[:, :, :30], ScoreOptions())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = partial_by_torch(q, k, v[:, :, :30], ScoreOptions())
    assert torch.equal(plain.out, cast.out)
    assert torch.equal(plain.log_sum_exp, cast.log_sum_exp)
