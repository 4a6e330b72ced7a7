"""Root-mean-square norms against float64 and against torch's seven passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from cxl_offload import _C
from cxl_offload.ops.norm import rms_norm, rms_norm_or_none
from cxl_offload.ops.view import FLOATS

from .test_linear import draw

ISAS = _C.supported_isas()
WIDTHS = (1, 7, 64, 2048, 4097)
EPS = 1e-6


def by_torch(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """As ``LlamaRMSNorm.forward``."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def assert_as_torch(found: torch.Tensor, expected: torch.Tensor, *, steps: int) -> None:
    """So many of the type's steps apart where the order of the sum moves a rounding.

    In float32 it moves the factor of a row by some steps of its own: one lane adds thousands.
    """
    steps = 16 if found.dtype is torch.float32 else steps
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    same = (found == expected) | expected.isnan()
    info = torch.finfo(found.dtype)
    _, exponents = expected.double().frexp()
    step = torch.exp2(exponents.double() - 1).clamp(min=info.tiny) * info.eps
    off = (found.double() - expected.double()).abs()
    assert bool((same | (off <= steps * step)).all())
    if found.dtype is not torch.float32:
        assert int((~same).sum()) <= max(5, found.numel() // 1000)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_double_precision(isa: str, dtype: torch.dtype, width: int) -> None:
    x, weight = draw(5, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    wide = x.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    room = exact.abs() * (torch.finfo(dtype).eps * 1.01 + 2.0**-21) + torch.finfo(dtype).tiny
    assert ((rms_norm(x, weight, EPS, isa=isa).double() - exact).abs() <= room).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_rounded_as_torch_rounds_them(isa: str, dtype: torch.dtype, width: int) -> None:
    x, ones = 3 * draw(40, width, dtype=dtype), torch.ones(width, dtype=dtype)
    assert_as_torch(rms_norm(x, ones, EPS, isa=isa), by_torch(x, ones), steps=1)
    weight = draw(width, dtype=dtype, seed=1)  # multiplies a step of the quotient
    assert_as_torch(rms_norm(x, weight, EPS, isa=isa), by_torch(x, weight), steps=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [5, 48, 100])
def test_norms_of_odd_numbers_are_those_of_torch(isa: str, dtype: torch.dtype, width: int) -> None:
    """Each row has one in its midst, or is of one alone."""
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    most = torch.finfo(dtype).max
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0, -0.0, least, most])
    x = draw(len(odd), width, dtype=dtype)
    x[:, width // 2] = odd.to(dtype)
    weight = draw(width, dtype=dtype, seed=1)
    for rows in (x, odd.to(dtype)[:, None].expand(-1, width)):
        for eps in (EPS, 0.0):
            expected = by_torch(rows, weight, eps)
            assert_as_torch(rms_norm(rows, weight, eps, isa=isa), expected, steps=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_a_row_depend_on_no_other_row_and_no_thread(isa: str, dtype: torch.dtype) -> None:
    x, weight = draw(300, 1000, dtype=dtype), draw(1000, dtype=dtype, seed=1)
    one = rms_norm(x, weight, EPS, 1, isa)
    for threads in (2, 3, {0: 2}):
        assert torch.equal(rms_norm(x, weight, EPS, threads, isa), one)
    for row in (0, 7, 299):
        assert torch.equal(rms_norm(x[row], weight, EPS, isa=isa), one[row])


@pytest.mark.parametrize("isa", ISAS)
def test_rows_are_read_where_they_lie(isa: str) -> None:
    wide, weight = draw(2, 3, 80), draw(30, seed=1)
    for x in (
        wide[..., 5:35],
        wide[:1, :1, :30].expand(4, 5, 30),
        wide.mT[..., :1].expand(2, 80, 30),
    ):
        found = rms_norm(x, weight, EPS, isa=isa)
        assert found.is_contiguous()
        assert torch.equal(found, rms_norm(x.contiguous(), weight, EPS, isa=isa))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0,)])
def test_norms_of_nothing_are_nothing(isa: str, shape: tuple[int, ...]) -> None:
    assert rms_norm(torch.ones(shape), torch.ones(shape[-1]), EPS, isa=isa).shape == shape


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 200),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    eps=st.sampled_from([0.0, 1e-6, 1.0]),
    dtype=st.sampled_from(list(FLOATS)),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**16),
)
def test_norms_of_any_shape_are_those_of_torch(
    rows: int, width: int, seed: int, scale: float, eps: float, dtype: torch.dtype, isa: str
) -> None:
    x = (scale * draw(rows, width, seed=seed)).to(dtype)
    weight = draw(width, dtype=dtype, seed=seed + 1)
    assert_as_torch(rms_norm(x, weight, eps, isa=isa), by_torch(x, weight, eps), steps=2)


def test_rows_by_their_address_give_the_same_bits_and_others_are_passed_on() -> None:
    x, weight = draw(2, 3, 64), torch.nn.Parameter(draw(64, seed=1))
    with torch.no_grad():
        found = rms_norm_or_none(x, weight, EPS)
        assert found is not None
        assert torch.equal(found, rms_norm(x, weight, EPS))
        apart = rms_norm_or_none(draw(2, 5, 80)[..., 9:73], weight, EPS)
        assert apart is not None
        assert torch.equal(apart, rms_norm(draw(2, 5, 80)[..., 9:73], weight, EPS))
    others: list[tuple[Any, Any]] = [
        (x.double(), weight.double()),
        (x, weight.bfloat16()),
        (x[..., :63], weight),
        (x.mT, draw(3)),
        (x.to("meta"), weight),
        (x, weight.to("meta")),
        (x[:0], weight),
        (x.to_sparse(), weight),
        (torch.tensor(1.0), weight),
        (x, draw(1, 64)),
        (x, torch.tensor(1.0)),
        (x, draw(128)[::2]),
    ]
    for rows, weights in others:
        assert rms_norm_or_none(rows, weights, EPS) is None


def test_norms_refuse_what_they_cannot_do() -> None:
    x, weight = draw(2, 64), draw(64, seed=1)
    with pytest.raises(ValueError, match="no dimension"):
        rms_norm(torch.tensor(1.0), weight, EPS)
    for other in (draw(63), draw(1, 64), weight.bfloat16(), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"weight .* for x float32 \(2, 64\)"):
            rms_norm(x, other, EPS)
    with pytest.raises(ValueError, match="not contiguous"):
        rms_norm(x, draw(128)[::2], EPS)
    with pytest.raises(ValueError, match="float64"):
        rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match="meta"):
        rms_norm(x.to("meta"), weight, EPS)
    with pytest.raises(ValueError, match="sse9"):
        rms_norm(x, weight, EPS, isa="sse9")
    with pytest.raises(ValueError, match="at least one"):
        rms_norm(x, weight, EPS, threads=0)
    for given_x in ([1.0], None, x.numpy()):
        with pytest.raises(TypeError, match=r"x is a \w+; pass a torch.Tensor"):
            rms_norm(given_x, weight, EPS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight is a int"):
        rms_norm(x, 2, EPS)  # type: ignore[arg-type]
    gone = draw(64)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="somebody resized it"):
        rms_norm(x, gone, EPS)
    with pytest.raises(ValueError, match="no derivative"):
        rms_norm(x, weight.clone().requires_grad_(), EPS)
    with pytest.raises(RuntimeError, match="rms_norm: torch records operators here"):
        make_fx(lambda rows: rms_norm(rows, weight, EPS))(x)


@pytest.mark.parametrize("eps", [-1e-6, float("nan")])
def test_eps_that_is_no_number_of_at_least_zero_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match=f"rms_norm: eps {eps}"):
        rms_norm(torch.ones(2, 8), torch.ones(8), eps)


def test_default_device_and_conjugates_change_nothing() -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    negative = torch.complex(torch.zeros(2, 8), -x).conj().imag
    assert negative.is_neg()
    expected = rms_norm(x, weight, EPS)
    assert torch.equal(rms_norm(negative, weight, EPS), expected)
    with torch.device("meta"):
        assert torch.equal(rms_norm(x, weight, EPS), expected)
