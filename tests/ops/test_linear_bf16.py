"""Linear layers by products of bfloat16, where the processor has them."""

from __future__ import annotations

import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.int4_weight import GroupForm, Int4Weight
from cxl_offload.ops.linear import linear
from tests.ops.test_linear import assert_near, draw

BF16, F16, F8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ISAS = _C.bf16_products()
FORMS: tuple[GroupForm, ...] = ("low, step", "rate, low", "zero, step")

pytestmark = [
    pytest.mark.skipif(not ISAS, reason="this processor has no VBMI"),
    pytest.mark.parametrize("isa", ISAS),
]


def codes_of(outputs: int, width: int, group: int, form: GroupForm) -> Int4Weight:
    source = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8, generator=source)
    first, second = (torch.rand(outputs, width // group, generator=source) + 0.5 for _ in range(2))
    if form == "zero, step":
        first = (first * 8).round()
    return Int4Weight(codes, torch.stack((first, second), -1).half(), form)


@pytest.mark.parametrize("of_x", [BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16, F8, torch.int8], ids=str)
@pytest.mark.parametrize("width", [1, 31, 64, 100, 513, 4100])
def test_products_are_those_of_float64(
    isa: str, of_x: torch.dtype, dtype: torch.dtype, width: int
) -> None:
    weight = draw(27, width, dtype=dtype, seed=1)
    for rows in (1, 2, 4, 6, 8, 11, 23):
        x = draw(rows, width, dtype=of_x)
        found = linear(x, weight, out_dtype=torch.float32, isa=isa)
        assert_near(found, x, weight.float())


@pytest.mark.parametrize("of_x", [BF16, F16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("width", "group"), [(128, 32), (256, 64), (128, 128), (4352, 64), (2304, 384), (96, 32)]
)
def test_products_of_codes_are_those_of_float64(
    isa: str, of_x: torch.dtype, form: GroupForm, width: int, group: int
) -> None:
    weight = codes_of(29, width, group, form)
    first, second = (part.double().repeat_interleave(group, 1) for part in weight.groups.unbind(-1))
    # Codes are multiplied as 16 more than they are: what that is worth bounds the rounding.
    step = 1 / first if form == "rate, low" else second
    low = {"low, step": first, "rate, low": second, "zero, step": first * second}[form]
    for rows in (1, 2, 4, 6, 17):
        x = draw(rows, width, dtype=of_x)
        found = linear(x, weight, out_dtype=torch.float32, isa=isa)
        off = (found.double() - x.double() @ weight.dequantized().double().t()).abs()
        room = x.double().abs() @ (31 * step + low).t() * 2.0**-20 + 1e-6
        assert (off <= room).all()


@pytest.mark.parametrize("of_x", [BF16, F16], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "int8", "codes"])
def test_a_row_has_the_same_bits_beside_any_other_rows(
    isa: str, of_x: torch.dtype, kind: str
) -> None:
    x = draw(20, 8192, dtype=of_x)
    weight: torch.Tensor | Int4Weight = codes_of(50, 8192, 64, "low, step")
    if kind != "codes":
        dtype = {"bf16": BF16, "fp16": F16, "fp8": F8, "int8": torch.int8}[kind]
        weight = draw(50, 8192, dtype=dtype, seed=1)
    whole = linear(x, weight, isa=isa)
    for rows in (1, 2, 3, 5, 8, 13):
        assert torch.equal(linear(x[:rows], weight, isa=isa), whole[:rows])


@pytest.mark.parametrize("of_x", [BF16, F16], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "int8", "codes"])
def test_rows_of_a_prompt_have_the_bits_that_few_of_them_have(
    isa: str, of_x: torch.dtype, kind: str
) -> None:
    """All threads arrange them, and as many as a cache has room for are multiplied at a time."""
    x, width = draw(1100, 8192, dtype=of_x)[:, 64:], 8128
    weight: torch.Tensor | Int4Weight = codes_of(50, width, 64, FORMS[0])
    if kind != "codes":
        weight = draw(50, width, dtype={"bf16": BF16, "fp16": F16, "fp8": F8}.get(kind, torch.int8))
    whole = linear(x, weight, isa=isa)
    for begin in (0, 57, 530, 1090):
        rows = x[begin : begin + 10]
        assert torch.equal(linear(rows, weight, isa=isa), whole[begin : begin + 10])


@pytest.mark.parametrize("dtype", [BF16, F8], ids=str)
def test_nan_and_infinity_spread_to_their_own_output_and_row(isa: str, dtype: torch.dtype) -> None:
    x, weight = draw(9, 200), draw(60, 200, seed=1)
    weight[31, 150] = float("nan")
    x[4, 199] = float("inf")
    weight[:, 199] = 1.0
    found = linear(x.to(BF16), weight.to(dtype), isa=isa)
    assert found[:, 31].isnan().all()
    others = torch.cat((found[:, :31], found[:, 32:]), dim=1)
    assert (others[4] == float("inf")).all()
    assert others[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, F8, torch.int8], ids=str)
def test_every_finite_weight_is_worth_what_torch_says(isa: str, dtype: torch.dtype) -> None:
    if dtype is BF16:
        weight = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    else:
        weight = torch.arange(256, dtype=torch.uint8).view(dtype)
    weight = weight[weight.float().isfinite()].unsqueeze(1)
    found = linear(torch.ones(1, 1, dtype=BF16), weight, out_dtype=torch.float32, isa=isa)[0]
    expected = weight[:, 0].float()
    if isa != "avx512vbmi":  # as the instruction has it
        expected[expected.abs() < torch.finfo(BF16).tiny] = 0
    assert torch.equal(found, expected)


def test_subnormal_numbers_count_only_without_products_of_bfloat16(isa: str) -> None:
    weight = torch.full((1, 1), 2.0**-130, dtype=BF16)
    x = torch.full((1, 1), 2.0**20, dtype=BF16)
    expected = 2.0**-110 if isa == "avx512vbmi" else 0
    assert float(linear(x, weight, out_dtype=torch.float32, isa=isa)) == expected
    assert float(linear(x, weight, out_dtype=torch.float32, isa="avx512")) == 2.0**-110


@pytest.mark.parametrize("kind", ["bf16", "fp8", "codes"])
def test_vectors_of_bfloat16_are_taken_unasked_only_where_they_are_fast(
    isa: str, kind: str
) -> None:
    tiled = kind != "codes" and "amxbf16" in ISAS  # 4-bit codes take tiles when asked only
    fast = _C.has_fast_bf16_products()
    assert fast == _C.has_fast_bf16_products()
    plain = "avx512vbmi" if kind == "fp8" else "avx512"
    taken = "amxbf16" if tiled else "avx512bf16" if fast else plain
    weight: torch.Tensor | Int4Weight = codes_of(50, 4352, 64, "low, step")
    if kind != "codes":
        weight = draw(50, 4352, dtype=BF16 if kind == "bf16" else F8)
    x = draw(3, 4352, dtype=BF16, seed=1)
    unasked = linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(unasked, linear(x, weight, out_dtype=torch.float32, isa=taken))
    other = isa if taken == "avx512" else "avx512"
    if other != "avx512vbmi":  # which has other bits for fp8 only
        assert not torch.equal(unasked, linear(x, weight, out_dtype=torch.float32, isa=other))


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="this processor has no AVX512-BF16")
@pytest.mark.parametrize("width", [1, 31, 64, 100, 513, 4100])
def test_8_bit_floats_have_the_bits_of_the_instruction_without_it(isa: str, width: int) -> None:
    weight = draw(77, width, dtype=F8, seed=1)
    for rows in (1, 2, 4, 6, 8, 11):
        x = draw(rows, width, dtype=BF16)
        found, expected = (
            linear(x, weight, out_dtype=torch.float32, isa=each)
            for each in ("avx512vbmi", "avx512bf16")
        )
        assert torch.equal(found, expected)


def test_other_types_are_computed_in_float32(isa: str) -> None:
    x = draw(3, 64)
    halves = () if isa == "amxbf16" else (x.half(),)
    for dtype in (torch.float32, F16, torch.int8, BF16):
        weight = draw(9, 64, dtype=dtype, seed=1)
        for numbers in (x, *halves):
            found = linear(numbers, weight, isa=isa)
            assert torch.equal(found, linear(numbers, weight, isa="avx512"))
    if isa == "amxbf16":  # tiles multiply float16 too, but not float32
        weight = draw(9, 64, seed=1)
        found = linear(x.half(), weight, isa=isa)
        assert torch.equal(found, linear(x.half(), weight, isa="avx512"))


def finite_halves() -> torch.Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(F16)
    return every[every.float().isfinite()]


def test_every_finite_float16_is_worth_what_it_is(isa: str) -> None:
    every = finite_halves()
    one = torch.ones(1, 1, dtype=F16)
    of_weights = linear(one, every.unsqueeze(1), out_dtype=torch.float32, isa=isa)[0]
    assert torch.equal(of_weights, every.float())
    of_x = linear(every.unsqueeze(1), one, out_dtype=torch.float32, isa=isa)[:, 0]
    assert torch.equal(of_x, every.float())


@pytest.mark.parametrize("dtype", [BF16, F16, F8], ids=str)
def test_what_is_no_number_of_float16_spreads_to_its_own_output_and_row(
    isa: str, dtype: torch.dtype
) -> None:
    x, weight = draw(9, 200, dtype=F16), draw(60, 200, dtype=dtype, seed=1)
    x[4, 199] = float("inf")
    weight[31, 150] = float("nan")
    found = linear(x, weight, out_dtype=torch.float32, isa=isa)
    assert not found[4].isfinite().any()
    assert found[:, 31].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert found[others][:, [i for i in range(60) if i != 31]].isfinite().all()
