"""What becomes of scores in decode attention, and several queries a sequence, against float64."""

from __future__ import annotations

import math

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
from cxl_offload.ops.int4_cache import Int4Cache

ISAS = _C.supported_isas()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    lengths: list[int],
    soft_cap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """(batch, heads, queries, dim) in float64, a score at a time as the formulas have it."""
    batch, heads, queries, dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv = h * k.shape[1] // heads
            for i in range(queries):
                end = lengths[b] - (queries - 1 - i if causal else 0)
                first_end = lengths[b] - (queries - 1 if causal else 0)
                own_end = end if causal else first_end
                seen = [
                    p
                    for p in range(max(end, 0))
                    if (window is None or p >= own_end - window) and (mask is None or mask[b, p])
                ]
                if not seen and sinks is None:
                    continue
                scores = k[b, kv, seen].double() @ q[b, h, i].double() / math.sqrt(dim)
                if soft_cap is not None:
                    scores = soft_cap * (scores / soft_cap).tanh()
                if bias is not None:
                    scores = scores + bias.expand(batch, heads, queries, -1)[b, h, i, seen].double()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[h : h + 1].double()))
                weights = scores.softmax(0)[: len(seen)]
                out[b, h, i] = weights @ v[b, kv, seen].double()
    return out


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 3, 290])
def test_each_of_several_queries_sees_up_to_its_own_position(
    isa: str, queries: int, window: int | None
) -> None:
    q, k, v = draw(2, 4, queries, 24), draw(2, 2, 301, 24, seed=1), draw(2, 2, 301, 24, seed=2)
    lengths = [301, 7]
    found = decode_attention(q, k, v, lengths=lengths, window=window, isa=isa)
    assert_close(found, expected(q, k, v, lengths=lengths, window=window))


def test_first_queries_of_a_short_sequence_see_nothing() -> None:
    q, k, v = draw(1, 2, 4, 16), draw(1, 2, 9, 16, seed=1), draw(1, 2, 9, 16, seed=2)
    found = decode_attention(q, k, v, lengths=[2])
    assert_close(found, expected(q, k, v, lengths=[2]))
    assert torch.equal(found[:, :, :2], torch.zeros(1, 2, 2, 16))


@pytest.mark.parametrize("isa", ISAS)
def test_queries_that_are_not_causal_see_all(isa: str) -> None:
    q, k, v = draw(1, 2, 3, 16), draw(1, 2, 40, 16, seed=1), draw(1, 2, 40, 16, seed=2)
    found = decode_attention(q, k, v, causal=False, isa=isa)
    assert_close(found, expected(q, k, v, lengths=[40], causal=False))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_several_queries_agree_with_one_at_a_time(isa: str, dtype: torch.dtype) -> None:
    """Queries of a cache that grows by a position at a time."""
    q = draw(2, 3, 4, 40).to(dtype)
    k, v = draw(2, 3, 200, 40, seed=3).to(dtype), draw(2, 3, 200, 40, seed=4).to(dtype)
    together = decode_attention(q, k, v, isa=isa)
    for i in range(4):
        alone = decode_attention(q[:, :, i].contiguous(), k, v, lengths=[197 + i] * 2, isa=isa)
        torch.testing.assert_close(together[:, :, i], alone, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
def test_soft_caps_bend_scores(isa: str, soft_cap: float) -> None:
    q, k, v = draw(2, 4, 1, 64) * 9, draw(2, 2, 300, 64, seed=1), draw(2, 2, 300, 64, seed=2)
    found = decode_attention(q[:, :, 0].contiguous(), k, v, soft_cap=soft_cap, isa=isa)
    assert_close(found, expected(q, k, v, lengths=[300] * 2, soft_cap=soft_cap)[:, :, 0])


def test_soft_caps_keep_what_is_not_a_number() -> None:
    q, k, v = draw(1, 1, 8), draw(1, 1, 20, 8, seed=1), draw(1, 1, 20, 8, seed=2)
    k[0, 0, 3, 0] = math.nan
    assert decode_attention(q, k, v, soft_cap=30.0).isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "shape",
    [(40,), (1, 40), (4, 1, 40), (2, 1, 1, 40), (1, 4, 1, 60), (2, 4, None, 40), (1,), (4, 1, 1)],
)
def test_biases_of_any_shape_are_added(
    isa: str, queries: int, shape: tuple[int | None, ...]
) -> None:
    q, k, v = draw(2, 4, queries, 16), draw(2, 2, 40, 16, seed=1), draw(2, 2, 40, 16, seed=2)
    bias = draw(*(queries if length is None else length for length in shape), seed=3)
    if shape[-1] != 1:
        bias[..., 5] = -math.inf
    found = decode_attention(q, k, v, bias=bias, isa=isa)
    whole = bias.expand(*bias.shape[:-1], 40) if shape[-1] == 1 else bias[..., :40]
    assert_close(found, expected(q, k, v, lengths=[40] * 2, bias=whole))


@pytest.mark.parametrize("isa", ISAS)
def test_alibi_is_a_bias_of_slopes_times_positions(isa: str) -> None:
    q, k, v = draw(2, 4, 16), draw(2, 4, 300, 16, seed=1), draw(2, 4, 300, 16, seed=2)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    bias = slopes[:, None] * torch.arange(300.0)
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(4)) < 0.5
    found = decode_attention(q, k, v, bias=bias, mask=mask, isa=isa)
    wanted = expected(q.unsqueeze(2), k, v, lengths=[300] * 2, bias=bias[None, :, None], mask=mask)
    assert_close(found, wanted[:, :, 0])


@pytest.mark.parametrize("isa", ISAS)
def test_sinks_take_weight_and_have_no_value(isa: str) -> None:
    q, k, v = draw(2, 4, 2, 16), draw(2, 2, 600, 16, seed=1), draw(2, 2, 600, 16, seed=2)
    sinks = torch.tensor([-3.0, 0.0, 5.0, 900.0])
    found = decode_attention(q, k, v, lengths=[600, 1], sinks=sinks, isa=isa)
    assert_close(found, expected(q, k, v, lengths=[600, 1], sinks=sinks))


def test_sinks_are_a_part_of_their_own() -> None:
    q, k, v = draw(1, 2, 16), draw(1, 2, 100, 16, seed=1), draw(1, 2, 100, 16, seed=2)
    sinks = torch.tensor([1.0, 2.0])
    parts = [
        decode_attention_partial(q, k[:, :, :60], v[:, :, :60]),
        decode_attention_partial(q, k[:, :, 60:], v[:, :, 60:]),
        Partial(torch.zeros(1, 2, 16), sinks.expand(1, 2)),
    ]
    found = combine(parts).out
    torch.testing.assert_close(found, decode_attention(q, k, v, sinks=sinks))


def test_parts_of_several_queries_join() -> None:
    q, k, v = draw(1, 2, 3, 16), draw(1, 2, 100, 16, seed=1), draw(1, 2, 100, 16, seed=2)
    first = decode_attention_partial(q, k[:, :, :60], v[:, :, :60], causal=False)
    last = decode_attention_partial(q, k[:, :, 60:], v[:, :, 60:])
    torch.testing.assert_close(combine([first, last]).out, decode_attention(q, k, v))


def test_all_rules_together_hold_in_flexgens_layout_and_in_blocks() -> None:
    q = draw(2, 4, 3, 32)
    caches = [draw(80, 2 * 2, 32, seed=seed) for seed in (1, 2)]
    k, v = (from_flexgen(cache, 2) for cache in caches)
    rules = {
        "soft_cap": 4.0,
        "bias": draw(4, 3, 80, seed=3),
        "sinks": draw(4, seed=4),
        "window": 20,
        "lengths": [80, 33],
    }
    wanted = expected(q, k, v, **rules)  # type: ignore[arg-type]
    assert_close(decode_attention(q, k, v, **rules), wanted)  # type: ignore[arg-type]
    table = torch.tensor([[4, 1, 2, 3, 0], [9, 5, 6, 7, 8]], dtype=torch.int32)
    blocks = []
    for cache in (k, v):
        stored = torch.empty(10, 16, 2, 32)
        for b in range(2):
            for column in range(5):
                part = cache[b, :, column * 16 : column * 16 + 16]
                stored[table[b, column]] = part.transpose(0, 1)
        blocks.append(stored)
    found = decode_attention(q, *blocks, block_table=table, **rules)  # type: ignore[arg-type]
    assert_close(found, wanted)


@pytest.mark.parametrize("isa", [*ISAS, *(["avx512vnni"] if _C.has_integer_codes() else [])])
def test_rules_hold_for_caches_of_codes(isa: str) -> None:
    source = torch.Generator().manual_seed(5)
    caches = []
    for _ in "kv":
        codes = torch.randint(0, 256, (2, 2, 300, 32), dtype=torch.uint8, generator=source)
        scales = torch.rand(2, 2, 300, 1, 2, generator=source).half() * 0.2
        caches.append(Int4Cache(codes, scales, "low, step"))
    worth = []
    for cache in caches:
        codes = torch.stack((cache.codes >> 4, cache.codes & 15), -1).flatten(-2).double()
        low, step = cache.scales.double().unbind(-1)
        worth.append(codes * step + low)
    q = draw(2, 4, 3, 64) * 0.3
    rules = {"soft_cap": 3.0, "bias": draw(300, seed=3), "sinks": draw(4, seed=4)}
    found = decode_attention(q, *caches, isa=isa, **rules)  # type: ignore[arg-type]
    assert_close(found, expected(q, *worth, lengths=[300] * 2, **rules))  # type: ignore[arg-type]


def test_rules_that_do_not_fit_are_refused() -> None:
    q, k, v = draw(2, 4, 3, 16), draw(2, 2, 40, 16, seed=1), draw(2, 2, 40, 16, seed=2)
    with pytest.raises(ValueError, match="sinks"):
        decode_attention(q, k, v, sinks=torch.ones(3))
    with pytest.raises(ValueError, match="soft_cap"):
        decode_attention(q, k, v, soft_cap=-1.0)
    with pytest.raises(ValueError, match="does not expand"):
        decode_attention(q, k, v, bias=torch.zeros(3, 3, 40))
    with pytest.raises(ValueError, match="positions"):
        decode_attention(q, k, v, bias=torch.zeros(39))
    with pytest.raises(ValueError, match="float32"):
        decode_attention(q, k, v, bias=torch.zeros(40).half())
    with pytest.raises(ValueError, match="multiple"):
        decode_attention(draw(2, 3, 3, 16), k, v)
    with pytest.raises(ValueError, match="queries"):
        decode_attention(draw(2, 16), k, v)
