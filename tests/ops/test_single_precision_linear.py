"""Linear layers in single precision: as exact as torch's, in a bounded buffer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from cxl_offload.ops import linear
from cxl_offload.ops.linear import SinglePrecisionLinear
from cxl_offload.ops.measured_linear import KernelLinear


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize(("rows", "few"), [(1, True), (64, True), (65, False), (300, False)])
def test_one_way_takes_the_kernel_for_few_rows_and_always_has_the_same_bits(
    rows: int, few: bool
) -> None:
    inputs, weight, bias = draw(rows, 96, seed=1), draw(33, 96, seed=2), draw(33, seed=3)
    found = KernelLinear()(inputs, weight, bias)
    way = linear.linear if few else SinglePrecisionLinear()
    assert torch.equal(found, way(inputs, weight, bias))
    assert torch.equal(found, KernelLinear()(inputs, weight, bias))
    wide = inputs.float()
    assert torch.equal(
        KernelLinear()(wide, weight.float()), functional.linear(wide, weight.float())
    )


@pytest.mark.parametrize("buffer", [1, 700, 2**19])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [(0,), (1, 1), (3, 7), (40,)])
def test_linear_is_at_least_as_close_to_double_precision_as_torch(
    monkeypatch: pytest.MonkeyPatch, buffer: int, has_bias: bool, rows: tuple[int, ...]
) -> None:
    monkeypatch.setattr(linear, "BUFFER_ELEMENTS", buffer)
    inputs, weight = draw(*rows, 96, seed=1), draw(33, 96, seed=2)
    bias = draw(33, seed=3) if has_bias else None
    before = inputs.clone(), weight.clone()
    found = SinglePrecisionLinear()(inputs, weight, bias)
    assert found.shape == (*rows, 33)
    assert found.dtype == torch.float16
    assert torch.equal(inputs, before[0])
    assert torch.equal(weight, before[1])
    exact = functional.linear(
        inputs.double(), weight.double(), None if bias is None else bias.double()
    )
    ours = (found.double() - exact).abs().sum()
    theirs = (functional.linear(inputs, weight, bias).double() - exact).abs().sum()
    assert ours <= theirs * 1.001


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 6e4])
def test_numbers_beyond_half_precision_come_out_as_torch_has_them(value: float) -> None:
    inputs, weight = draw(8, 64, seed=1), draw(5, 64, seed=2)
    inputs[1, 3] = value
    weight[2, 3] = 6e4
    found = SinglePrecisionLinear()(inputs, weight)
    expected = functional.linear(inputs.double(), weight.double()).half()
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3, equal_nan=True)


def test_other_types_are_left_to_torch() -> None:
    inputs, weight = draw(8, 64, seed=1).double(), draw(5, 64, seed=2).double()
    ours = SinglePrecisionLinear()
    assert torch.equal(ours(inputs, weight), functional.linear(inputs, weight))
