"""Decode attention over 4-bit codes against softmax in float64 over what the codes are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.attention import decode_attention, decode_attention_partial
from cxl_offload.ops.int4_cache import Int4Cache, int4_from_flexgen, int4_from_packed
from cxl_offload.transfer.packing import PackedFormat, pack
from tests.ops.test_attention import BF16, F16, assert_close, draw, oracle
from tests.ops.test_attention import ISAS as NUMBER_ISAS

# With "avx512vnni" codes are multiplied as integers, with the others as numbers.
ISAS = [*NUMBER_ISAS, *(["avx512vnni"] if _C.has_integer_codes() else [])]
FORMS = pytest.mark.parametrize("form", ["low, step", "rate, low"])


def worth(cache: Int4Cache, dim: int) -> torch.Tensor:
    """Every number in float64, by the format's definition."""
    codes = torch.stack([cache.codes >> 4, cache.codes & 15], dim=-1).flatten(-2).double()
    groups = codes.unflatten(-1, (cache.scales.shape[-2], -1))
    first, second = (scale.double() for scale in cache.scales.split(1, dim=-1))
    numbers = groups * second + first if cache.form == "low, step" else groups / first + second
    return numbers.flatten(-2)[..., :dim]


def random_cache(
    *outer: int, dim: int, form: str, group: int = 64, seed: int = 0, offset: int = 0
) -> Int4Cache:
    """Codes at every address modulo a vector, with scales like those of standard normal numbers."""
    source = torch.Generator().manual_seed(seed)
    groups = -(-dim // group)
    shape = (*outer, groups * group // 2)
    base = torch.empty(math.prod(shape) + offset, dtype=torch.uint8)
    codes = base[offset:].view(shape).random_(0, 256, generator=source)
    step = torch.rand(*outer, groups, generator=source) * 0.3 + 0.1
    low = -7.5 * step + torch.randn(*outer, groups, generator=source) * 0.1
    pair = (low, step) if form == "low, step" else (1 / step, low)
    return Int4Cache(codes, torch.stack(pair, dim=-1).half(), form)  # type: ignore[arg-type]


@FORMS
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (80, 64), (128, 128), (192, 64), (130, 192)])
@pytest.mark.parametrize("seq", [1, 3, 67, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_follows_oracle_for_odd_sizes_and_grouped_queries(
    form: str, isa: str, dim: int, group: int, seq: int, kv_heads: int
) -> None:
    q = draw(2, 6, dim, dtype=BF16, seed=1, offset=1)
    k, v = (
        random_cache(2, kv_heads, seq, dim=dim, form=form, group=group, seed=seed, offset=seed)
        for seed in (1, 2)
    )
    found = decode_attention_partial(q, k, v, isa=isa)
    out, sums = oracle(q, worth(k, dim), worth(v, dim))
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


@pytest.mark.parametrize("isa", ISAS)
def test_every_byte_is_worth_its_two_codes(isa: str) -> None:
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(8, 1, 1, 32)
    scales = torch.tensor([-0.75, 0.5]).half().expand(8, 1, 1, 1, 2).contiguous()
    v = Int4Cache(every, scales, "low, step")
    found = decode_attention(torch.zeros(8, 1, 64), v, v, isa=isa)
    torch.testing.assert_close(found[:, 0].double(), worth(v, 64)[:, 0, 0], rtol=0, atol=0)


@FORMS
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scale", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("dim", [64, 128])
def test_groups_without_finite_scales_follow_oracle(
    form: str, isa: str, scale: float, which: int, where: str, dim: int
) -> None:
    """A FlexGen group of equal numbers has an infinite rate; one with an infinity a rate of 0."""
    q = draw(2, 2, dim)
    caches = {
        name: random_cache(2, 2, 70, dim=dim, form=form, seed=seed)
        for seed, name in enumerate(("k", "v"))
    }
    caches[where].scales[1, 1, 5, -1, which] = scale
    expected = oracle(q, *(worth(cache, dim) for cache in caches.values()))[0]
    assert_close(decode_attention(q, **caches, isa=isa), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_infinite_queries_follow_oracle(isa: str, value: float) -> None:
    q = draw(2, 2, 64)
    q[1, 1, 3] = value
    k, v = (random_cache(2, 2, 70, dim=64, form="low, step", seed=seed) for seed in (1, 2))
    assert_close(decode_attention(q, k, v, isa=isa), oracle(q, worth(k, 64), worth(v, 64))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-30, 1e6, 1e31])
def test_queries_of_any_size_follow_oracle(isa: str, factor: float) -> None:
    q = draw(2, 4, 128) * factor
    k, v = (random_cache(2, 2, 300, dim=128, form="low, step", seed=seed) for seed in (1, 2))
    assert_close(decode_attention(q, k, v, isa=isa), oracle(q, worth(k, 128), worth(v, 128))[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_of_one_huge_number_among_tiny_ones_are_within_the_stated_error(
    isa: str, dim: int
) -> None:
    """docs/attention.md: each number of q is off by 2^-22.9 of the greatest of its 64."""
    q = draw(40, 1, dim) * 1e-3
    q[:, 0, 3] = 1000.0
    k = random_cache(40, 1, 1, dim=dim, form="rate, low")
    found = decode_attention_partial(q, k, k, scale=1.0, isa=isa).log_sum_exp[:, 0].double()
    expected = (worth(k, dim)[:, 0, 0] * q[:, 0].double()).sum(dim=1)
    steps = 1 / k.scales[:, 0, 0, :, 0].double()
    greatest = q[:, 0].unflatten(-1, (-1, 64)).abs().amax(dim=-1).double()
    whole = (2.0**-22.9 * greatest * steps * 64 * 8).sum(dim=1)
    assert ((found - expected).abs() <= whole + 1e-6 * expected.abs()).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("layout", ["contiguous", "flexgen"])
def test_one_weight_near_one_and_thousands_near_zero_follow_oracle(
    isa: str, dim: int, layout: str
) -> None:
    q = draw(1, 3, dim).abs()
    whole = [random_cache(3000, 3, dim=dim, form="rate, low", seed=seed) for seed in (1, 2)]
    k, v = (int4_from_flexgen(cache.codes, cache.scales, 1) for cache in whole)
    k.scales[:, :, 1234, :, 1] = 3.0
    if layout == "contiguous":
        k, v = (Int4Cache(c.codes.contiguous(), c.scales.contiguous(), c.form) for c in (k, v))
    found = decode_attention_partial(q, k, v, isa=isa)
    out, sums = oracle(q, worth(k, dim), worth(v, dim))
    assert sums.min() > 6  # exp(6) times the others together
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dim", [64, 128])
def test_values_of_very_different_ranges_are_within_the_stated_error(isa: str, dim: int) -> None:
    """docs/attention.md: a weight times a step is off by 2^-23.9 of the greatest of 256 rows."""
    q = draw(1, 2, dim)
    k, v = (random_cache(1, 2, 900, dim=dim, form="low, step", seed=seed) for seed in (1, 2))
    power = torch.rand(v.scales.shape[:-1], generator=torch.Generator().manual_seed(3)) * 16 - 14
    v.scales.copy_((v.scales.float() * torch.exp2(power)[..., None]).half())
    found = decode_attention(q, k, v, isa=isa).double().numpy()
    expected = oracle(q, worth(k, dim), worth(v, dim))[0]
    assert np.abs(found - expected).max() <= 2.0**-20 * worth(v, dim).abs().max()


@pytest.mark.parametrize("heads", [1, 3, 8, 24])
@pytest.mark.parametrize("dim", [64, 128])
def test_flexgen_layout_with_mask_window_and_lengths_follows_oracle(heads: int, dim: int) -> None:
    q = draw(2, heads, dim, dtype=F16)
    caches = []
    for seed in (1, 2):
        whole = random_cache(500, 2 * heads, dim=dim, form="rate, low", seed=seed)
        caches.append(int4_from_flexgen(whole.codes, whole.scales, 2))
        assert caches[-1].codes.data_ptr() == whole.codes.data_ptr()
    mask = torch.rand(2, 500, generator=torch.Generator().manual_seed(5)) < 0.5
    lengths = np.array([500, 333])[:, None]
    at = np.arange(500)
    attended = mask.numpy() & (at < lengths) & (at >= lengths - 300)
    for row in range(2):
        for cache in caches:  # what is hidden is not read
            cache.scales[row, :, torch.from_numpy(~attended[row])] = math.nan
    found = decode_attention_partial(q, *caches, mask=mask, window=300, lengths=[500, 333])
    out, sums = oracle(q, *(worth(cache, dim) for cache in caches), attended)
    assert_close(found.out, out)
    assert_close(found.log_sum_exp, sums)


@pytest.mark.parametrize("group", [64, 128])
def test_blocks_that_the_transfers_packed_are_attended_in_place(group: int) -> None:
    """A page of vLLM's layout packed as for the GPU, and a block table over such pages."""
    q = draw(2, 4, 128)
    layout = PackedFormat("int4", "float32", group)
    pages, caches, unpacked = 5, [], []
    for seed in (1, 2):
        plain = draw(pages, 16, 2, 128, seed=seed)
        packed = torch.zeros(pages, layout.packed_bytes(16 * 2 * 128), dtype=torch.uint8)
        for page in range(pages):
            pack(
                layout,
                source=plain[page].data_ptr(),
                elements=plain[page].numel(),
                target=packed[page].data_ptr(),
            )
        cache = int4_from_packed(packed, block_size=16, kv_heads=2, dim=128, group=group)
        assert (worth(cache, 128) - plain).abs().max() < 0.4
        caches.append(cache)
        unpacked.append(worth(cache, 128))
    table = torch.tensor([[4, 0, 3], [1, 2, -1]], dtype=torch.int32)
    gathered = [x[table.clamp(min=0).long()].flatten(1, 2).transpose(1, 2) for x in unpacked]
    lengths = [45, 17]
    attended = np.arange(48) < np.array(lengths)[:, None]
    found = decode_attention(q, *caches, block_table=table, lengths=lengths)
    assert_close(found, oracle(q, *gathered, attended)[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_same_bits_for_any_number_of_threads(threads: int) -> None:
    q = draw(1, 2, 64)
    k, v = (random_cache(1, 1, 6000, dim=64, form="low, step", seed=seed) for seed in (1, 2))
    assert torch.equal(
        decode_attention(q, k, v, threads=threads), decode_attention(q, k, v, threads=1)
    )


def good() -> Int4Cache:
    return random_cache(2, 2, 10, dim=64, form="low, step")


BAD: dict[str, tuple[dict[str, object], str]] = {
    "one cache of numbers": ({"k": torch.zeros(2, 2, 10, 64)}, "one of k and v"),
    "two forms": ({"k": random_cache(2, 2, 10, dim=64, form="rate, low")}, "one form"),
    "codes of numbers": ({"k": Int4Cache(draw(2), draw(2), "low, step")}, "k.codes is torch.float"),
    "scales of float32": (
        {"v": Int4Cache(good().codes, good().scales.float(), "low, step")},
        "v.scales is torch.float32",
    ),
    "scales of other rows": (
        {"v": Int4Cache(good().codes, good().scales[:, :, 1:], "low, step")},
        r"scales \(2, 2, 9, 1, 2\)",
    ),
    "groups of 32": (
        {
            "k": random_cache(2, 2, 10, dim=64, group=32, form="low, step"),
            "v": random_cache(2, 2, 10, dim=64, group=32, form="low, step"),
        },
        "multiple of 64",
    ),
    "q of too many numbers": ({"q": torch.ones(2, 4, 65)}, "heads of 65"),
    "q of too few numbers": (
        {**dict.fromkeys("kv", random_cache(2, 2, 10, dim=128, form="low, step"))},
        "groups of 64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises(case: str) -> None:
    inputs: dict[str, object] = {"q": torch.ones(2, 4, 64), "k": good(), "v": good()}
    decode_attention(**inputs)  # type: ignore[arg-type]
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        decode_attention(**{**inputs, **change})  # type: ignore[arg-type]


def test_tensors_that_are_no_such_caches_are_refused() -> None:
    codes = torch.zeros(10, 6, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="4 \\* heads"):
        int4_from_flexgen(codes, torch.zeros(10, 6, 1, 2).half(), 4)
    with pytest.raises(ValueError, match="do not divide heads of 80"):
        int4_from_packed(codes, block_size=16, kv_heads=2, dim=80)
    with pytest.raises(ValueError, match="1152 bytes each"):
        int4_from_packed(codes[0], block_size=16, kv_heads=2, dim=64)
