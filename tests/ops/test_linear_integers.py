"""Layers of 4-bit codes by products of integers, where the processor has them."""

from __future__ import annotations

import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.int4_weight import GroupForm, Int4Weight
from cxl_offload.ops.linear import linear
from cxl_offload.ops.measured_linear import (
    INTEGERS,
    KERNEL,
    TILES,
    MeasuredLinear,
    kernel_ways,
)
from tests.ops.test_linear import draw
from tests.ops.test_linear_bf16 import FORMS, codes_of

ISA = "avx512vnni"

pytestmark = pytest.mark.skipif(
    not _C.has_integer_codes(), reason="this processor has no AVX512-VNNI"
)


def assert_near(found: torch.Tensor, x: torch.Tensor, weight: Int4Weight) -> None:
    """Within what float32 sums and x of 24 bits of the greatest of 128 numbers change."""
    group = weight.codes.shape[1] * 2 // weight.groups.shape[1]
    first, second = (part.double().repeat_interleave(group, 1) for part in weight.groups.unbind(-1))
    step = 1 / first if weight.form == "rate, low" else second
    low = {"low, step": first, "rate, low": second, "zero, step": first * second}[weight.form]
    x = x.double()
    off = (found.double() - x @ weight.dequantized().double().t()).abs()
    worth = (15 * step + low.abs()).t()
    blocks = x.abs().unflatten(-1, (-1, 128)).amax(-1, keepdim=True).expand(-1, -1, 128)
    room = x.abs() @ worth * 2.0**-21 + blocks.flatten(1) @ worth * 2.0**-23 + 1e-30
    assert (off <= room).all(), f"off by {float((off / room).max())} times as much as it may be"


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("width", "group"), [(128, 32), (256, 64), (128, 128), (4352, 64), (2304, 384), (8192, 64)]
)
def test_products_of_codes_are_those_of_float64(
    of_x: torch.dtype, form: GroupForm, width: int, group: int
) -> None:
    weight = codes_of(29, width, group, form)
    for rows in (1, 2, 3, 4, 6, 17):
        x = draw(rows, width, dtype=of_x)
        assert_near(linear(x, weight, out_dtype=torch.float32, isa=ISA), x, weight)


@pytest.mark.parametrize("factor", [0.0, 1e-33, 1e-30, 1e-6, 1e30])
def test_numbers_of_any_size_are_worth_what_they_are(factor: float) -> None:
    x, weight = draw(3, 256) * factor, codes_of(9, 256, 64, "low, step")
    assert_near(linear(x, weight, isa=ISA), x, weight)


def test_one_great_number_costs_those_of_its_128_digits_and_no_others() -> None:
    x, weight = draw(2, 512), codes_of(9, 512, 64, "low, step")
    x[0, 130] = 1e6
    found = linear(x, weight, isa=ISA)
    assert_near(found, x, weight)
    x[0, 130] = 0
    weight.codes[:, 65] &= 0x0F
    assert torch.equal(found[1:], linear(x[1:], codes_of(9, 512, 64, "low, step"), isa=ISA))


def test_a_row_has_the_same_bits_beside_any_other_rows() -> None:
    x, weight = draw(20, 8192), codes_of(50, 8192, 64, "low, step")
    whole = linear(x, weight, isa=ISA)
    for rows in (1, 2, 3, 5, 8, 13):
        assert torch.equal(linear(x[:rows], weight, isa=ISA), whole[:rows])
    assert torch.equal(linear(x, weight, isa=ISA, threads=1), whole)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_gives_nan_in_its_own_row(odd: float) -> None:
    x, weight = draw(9, 384), codes_of(60, 384, 64, "low, step")
    x[4, 300] = odd
    found = linear(x, weight, isa=ISA)
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_rows_and_groups_that_are_no_whole_registers_are_multiplied_as_numbers() -> None:
    for width, group in ((96, 32), (192, 96), (320, 64)):
        x, weight = draw(5, width), codes_of(20, width, group, "rate, low")
        assert torch.equal(linear(x, weight, isa=ISA), linear(x, weight, isa="avx512"))


def test_other_weights_are_multiplied_as_numbers() -> None:
    x = draw(3, 128)
    for dtype in (torch.float32, torch.float16, torch.int8):
        weight = draw(9, 128, dtype=dtype, seed=1)
        assert torch.equal(linear(x, weight, isa=ISA), linear(x, weight, isa="avx512"))


def test_integers_are_a_way_of_codes_alone() -> None:
    weight, x = codes_of(64, 256, 64, "low, step"), draw(2, 256)
    ways = kernel_ways(
        lambda: 1, lambda codes: Int4Weight(codes, weight.groups[: len(codes)], weight.form)
    )
    of_codes = MeasuredLinear(ways={INTEGERS: ways[INTEGERS]})
    found = of_codes.by(of_codes.key(x, weight.codes), x, weight.codes, None)
    assert torch.equal(found, linear(x, weight, isa=ISA))
    of_halves = MeasuredLinear(ways=kernel_ways(lambda: 1))
    half = draw(64, 256, dtype=torch.float16, seed=1)
    for _ in range(20):
        of_halves.by(of_halves.key(x, half), x, half, None)
    assert INTEGERS not in of_halves.chosen.values()
    assert set(of_halves.chosen.values()) <= {KERNEL, TILES}
