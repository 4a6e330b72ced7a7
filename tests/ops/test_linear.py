"""Linear layers of few rows against float64, for every type, layout and instruction set."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops.int4_weight import Int4Weight, int4_quantized
from cxl_offload.ops.linear import (
    WEIGHT_DTYPES,
    PreparedLayers,
    PreparedLinear,
    SinglePrecisionLinear,
    linear,
)

ISAS = _C.supported_isas()
F8 = torch.float8_e4m3fn


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    if dtype is torch.int8:
        return torch.randint(-128, 128, shape, generator=source, dtype=torch.int8)
    return torch.randn(shape, generator=source).to(dtype)


def assert_near(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Within what float32 sums and one rounding of the result may be off."""
    x, weight = x.double(), weight.double()
    expected = x @ weight.t()
    room = (x.abs() @ weight.abs().t()) * 2.0**-21 * math.log2(max(x.shape[-1], 2))
    if bias is not None:
        expected = expected + bias.double()
        room = room + bias.double().abs() * 2.0**-23
    room = room + expected.abs() * torch.finfo(found.dtype).eps * 0.51 + 2.0**-24
    off = (found.double() - expected).abs()
    assert (off <= room).all(), f"off by {float((off - room).max())} more than it may be"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [(1, 1, 1), (1, 97, 64), (2, 50, 127), (3, 49, 130), (4, 64, 96), (5, 9, 33), (6, 48, 256),
     (7, 31, 100), (8, 100, 513), (9, 5, 66), (17, 52, 40), (64, 13, 129), (3, 7, 4100)],
)  # fmt: skip
def test_linear_is_the_product_in_float64(
    isa: str, dtype: torch.dtype, rows: int, outputs: int, width: int
) -> None:
    x, weight = draw(rows, width), draw(outputs, width, dtype=dtype, seed=1)
    bias = draw(outputs, seed=2)
    assert_near(linear(x, weight, bias, isa=isa), x, weight.float(), bias)
    assert_near(linear(x, weight, isa=isa), x, weight.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_takes_and_gives_any_float(
    isa: str, x_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    x, weight = draw(5, 100, dtype=x_dtype), draw(70, 100, dtype=torch.bfloat16, seed=1)
    bias = draw(70, dtype=x_dtype, seed=2)
    found = linear(x, weight, bias, out_dtype=out_dtype, isa=isa)
    assert found.dtype is out_dtype
    assert_near(found, x, weight, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F8, torch.int8], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 7])
def test_linear_scales_weights_by_output_and_group(
    isa: str, dtype: torch.dtype, groups: int
) -> None:
    width = 7 * 2 * 19
    x, weight = draw(6, width), draw(53, width, dtype=dtype, seed=1)
    scale = draw(53, groups, seed=3).abs()
    worth = weight.float() * scale.repeat_interleave(width // groups, dim=1)
    assert_near(linear(x, weight, scale=scale, isa=isa), x, worth)
    turned = scale.t().contiguous().t()
    assert_near(linear(x, weight, scale=turned, isa=isa), x, worth)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_linear_scales_weights_by_one_number(isa: str, dtype: torch.dtype) -> None:
    x, weight = draw(2, 64), draw(53, 64, dtype=dtype, seed=1)
    assert_near(linear(x, weight, scale=torch.tensor(0.3), isa=isa), x, weight.float() * 0.3)
    scale = draw(53, seed=2)
    found = linear(x, weight, scale=scale, isa=isa)
    assert_near(found, x, weight.float() * scale.unsqueeze(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", ["low, step", "rate, low", "zero, step"])
@pytest.mark.parametrize(("width", "group"), [(32, 32), (96, 32), (256, 64), (4352, 128), (96, 96)])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 11])
def test_linear_of_codes_is_the_product_of_what_they_are_worth(
    isa: str, form: str, width: int, group: int, rows: int
) -> None:
    outputs = 55
    source = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8, generator=source)
    first, second = torch.rand(2, outputs, width // group, generator=source) + 0.5
    if form == "zero, step":
        first = (first * 8).round()
    weight = Int4Weight(codes, torch.stack((first, second), -1).half(), form)  # type: ignore[arg-type]
    x = draw(rows, width)
    assert_near(linear(x, weight, isa=isa), x, weight.dequantized())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [*WEIGHT_DTYPES, torch.uint8], ids=str)
def test_linear_gives_a_row_the_same_bits_beside_any_other_rows(
    isa: str, dtype: torch.dtype
) -> None:
    x = draw(20, 4224)
    weight = (
        int4_quantized(draw(50, 4224, seed=1))
        if dtype is torch.uint8
        else draw(50, 4224, dtype=dtype, seed=1)
    )
    whole = linear(x, weight, isa=isa)
    for rows in (1, 2, 3, 4, 6, 7, 8, 13):
        assert torch.equal(linear(x[:rows], weight, isa=isa), whole[:rows])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_linear_gives_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    x, weight = draw(3, 300), draw(1500, 300, dtype=torch.float16, seed=1)
    assert torch.equal(linear(x, weight, threads=threads), linear(x, weight, threads=2))


@pytest.mark.parametrize("isa", ISAS)
def test_linear_reads_views_into_flat_buffers_where_they_lie(isa: str) -> None:
    flat = draw(70 * 130 + 3, dtype=torch.float16, seed=1)
    weight = flat.as_strided((60, 100), (130, 1), 3)
    x = draw(4, 300).as_strided((3, 100), (101, 1), 7)
    assert_near(linear(x, weight, isa=isa), x, weight.clone())
    backwards = flat.flip(0)[:6000].view(60, 100).t().contiguous().t()  # columns apart
    with pytest.raises(ValueError, match="contiguous"):
        linear(x, backwards, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("width", [37, 64, 100])
def test_linear_reads_no_weight_beyond_its_row(isa: str, dtype: torch.dtype, width: int) -> None:
    """Elements beside a row are NaN, or large, and must not matter."""
    if dtype is torch.int8:
        room = torch.full((9, width + 70), 127, dtype=dtype)
    else:
        room = torch.full((9, width + 70), float("nan")).to(dtype)
    weight = draw(9, width, dtype=dtype, seed=1)
    room[:, :width] = weight
    x = draw(5, width)
    assert_near(linear(x, room[:, :width], isa=isa), x, weight.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F8], ids=str)
def test_linear_spreads_nan_to_its_own_output_and_row(isa: str, dtype: torch.dtype) -> None:
    x, weight = draw(9, 200), draw(60, 200, dtype=torch.float32, seed=1)
    weight[31, 150] = float("nan")
    x[4, 199] = float("inf")
    weight[:, 199] = 1.0
    found = linear(x, weight.to(dtype), isa=isa)
    assert found[:, 31].isnan().all()
    others = torch.cat((found[:, :31], found[:, 32:]), dim=1)
    assert (others[4] == float("inf")).all()
    assert others[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [F8, torch.int8], ids=str)
def test_linear_keeps_infinite_inputs_of_one_group_out_of_the_next(
    isa: str, dtype: torch.dtype
) -> None:
    """Groups of 19 end inside of a vector, whose other lanes belong to the next group."""
    x, weight = draw(2, 38), draw(5, 38, dtype=dtype, seed=1)
    x[0, 19] = float("inf")
    weight[:, 19] = torch.tensor(1).to(dtype)
    assert (linear(x, weight, scale=torch.ones(5, 2), isa=isa)[0] == float("inf")).all()


def test_linear_keeps_the_leading_dimensions() -> None:
    x, weight = draw(2, 3, 40), draw(6, 40, seed=1)
    assert linear(x, weight).shape == (2, 3, 6)
    assert linear(x[0, 0], weight).shape == (6,)
    assert linear(x[:0], weight).shape == (0, 3, 6)
    assert_near(linear(x.transpose(0, 1), weight).reshape(6, 6), x.transpose(0, 1).reshape(6, 40),
                weight)  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
def test_linear_of_rows_without_elements_is_the_bias(isa: str) -> None:
    x, weight, bias = draw(2, 3, 0), draw(6, 0), draw(6)
    assert torch.equal(linear(x, weight, bias, isa=isa), bias.expand(2, 3, 6))
    assert torch.equal(linear(x[0, 0], weight, isa=isa), torch.zeros(6))
    assert torch.equal(PreparedLinear(weight, bias)(x), bias.expand(2, 3, 6))
    assert linear(x[:0], weight, isa=isa).shape == (0, 3, 6)


@pytest.mark.parametrize("outputs", [6, 4096])
def test_prepared_layers_look_at_their_memory(outputs: int) -> None:
    """FSDP resizes storages in place."""
    x, weight = draw(1, 1024), draw(outputs, 1024, seed=1)
    bias = draw(outputs, seed=2)
    prepared, expected = PreparedLinear(weight, bias), linear(x, weight, bias)
    saved = weight.clone()
    for held in (weight, bias):
        held.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="of its storage, which has 0"):
            prepared(x)
        held.untyped_storage().resize_(held.numel() * 4)
    weight.copy_(saved)
    bias.copy_(draw(outputs, seed=2))
    assert torch.equal(prepared(x), expected)


def test_layers_are_prepared_for_as_long_as_their_weights_live() -> None:
    layers, x = PreparedLayers(), draw(2, 64)
    weight, bias = draw(6, 64, seed=1), draw(6, seed=2)
    storage = weakref.ref(weight.untyped_storage())
    assert torch.equal(layers(x, weight, bias), linear(x, weight, bias))
    assert torch.equal(layers(x, weight, None), linear(x, weight))
    weight.data = draw(6, 64, seed=3)
    assert torch.equal(layers(x, weight, bias), linear(x, weight, bias))
    assert torch.equal(layers(x[:, ::2], weight[:, :32], None), linear(x[:, ::2], weight[:, :32]))
    del weight
    gc.collect()
    assert storage() is None
    assert not layers._known
    wanted = draw(6, 64).requires_grad_()
    with pytest.raises(ValueError, match="linear has no derivative"):
        layers(x, wanted, None)
    with pytest.raises(TypeError, match="weight is a list"):
        layers(x, [1.0], None)  # type: ignore[arg-type]


def test_negated_views_are_called_by_their_name() -> None:
    x, weight = draw(2, 8), draw(3, 8, seed=1)
    with pytest.raises(ValueError, match=r"weight is a negated view; pass weight.resolve_neg\(\)"):
        linear(x, torch._neg_view(weight))
    half = SinglePrecisionLinear()
    assert half(x.half()[:, :0], weight.half()[:, :0]).eq(0).all()


def test_linear_refuses_what_it_cannot_do() -> None:
    x, weight = draw(2, 64), draw(6, 64, seed=1)
    codes = int4_quantized(draw(6, 64))
    with pytest.raises(ValueError, match="another width"):
        linear(x[:, :63], weight)
    with pytest.raises(ValueError, match=r"another width than weights .*, two 4-bit codes a byte"):
        linear(draw(2, 32), codes)
    with pytest.raises(ValueError, match="no dimension"):
        linear(torch.tensor(1.0), weight)
    with pytest.raises(ValueError, match="bias"):
        linear(x, weight, draw(5))
    with pytest.raises(ValueError, match="float64"):
        linear(x.double(), weight)
    with pytest.raises(ValueError, match="float8_e5m2"):
        linear(x, weight.to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="of 8 bits"):
        linear(x, weight, scale=torch.ones(6, 2))
    with pytest.raises(ValueError, match="dividing a row"):
        linear(x, weight.to(F8), scale=torch.ones(6, 3))
    with pytest.raises(ValueError, match="no others"):
        linear(x, codes, scale=torch.ones(6))
    with pytest.raises(ValueError, match="multiple of 32"):
        linear(x, Int4Weight(codes.codes, codes.groups.repeat(1, 4, 1), codes.form))
    for shape in ((6, 0), (0,), (0, 64), (6, 0, 1)):
        with pytest.raises(ValueError, match="scale of shape"):
            linear(x, weight.to(torch.int8), scale=torch.zeros(shape))
    lost = torch.ones(6)
    lost.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"scale of shape .* somebody resized it"):
        linear(x, weight, scale=lost)
    for given in ([1.0], None, x.numpy()):
        with pytest.raises(TypeError, match=r"x is a \w+; pass a torch.Tensor"):
            linear(given, weight)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"weight is a \w+; pass a torch.Tensor"):
            linear(x, given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale is a int"):
        linear(x, weight, scale=2)  # type: ignore[arg-type]
    known = ", ".join(["scalar.*", *_C.bf16_products()])
    with pytest.raises(ValueError, match=f"sse9.*{known}"):
        linear(x, weight, isa="sse9")
    with pytest.raises(ValueError, match="no derivative"):
        linear(x.requires_grad_(), weight)


def test_default_device_and_conjugates_change_nothing() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    negative = torch.complex(torch.zeros(2, 8), -x).conj().imag
    assert negative.is_neg()
    expected = linear(x, weight)
    assert torch.equal(linear(negative, weight), expected)
    with torch.device("meta"):
        assert torch.equal(linear(x, weight), expected)


@pytest.mark.slow(reason="multiplies a million rows")
def test_narrow_layers_with_many_rows_take_little_memory() -> None:
    """Sums were made for the outputs that a megabyte of weights has, whether there are any."""
    code = (
        "import resource, torch\n"
        "from cxl_offload.ops.linear import linear\n"
        "x, weight = torch.ones(1 << 16, 1), torch.ones(1, 1)\n"
        "linear(x[:1], weight)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert torch.equal(linear(x, weight), x)\n"
        "assert linear(x[:512], torch.ones(1 << 16, 1)).eq(1).all()\n"
        "x = torch.arange(8e6).remainder(7).view(-1, 8)\n"
        "assert torch.equal(linear(x, torch.ones(1, 8)), x.sum(1, keepdim=True))\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 512  # MiB; 128 of them are a result, and 100 are x and its sums


def test_rows_beyond_those_multiplied_at_a_time_have_the_same_bits() -> None:
    x, weight = draw(40_000, 3, seed=1), draw(5, 3, seed=2)
    found = linear(x, weight)
    apart = [linear(part, weight) for part in x.split(999)]
    assert torch.equal(found, torch.cat(apart))
    assert (found.double() - x.double() @ weight.double().T).abs().max() < 1e-5
