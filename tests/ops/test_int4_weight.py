"""Weights of 4-bit codes: made from floats, and from checkpoints of GPTQ and AWQ."""

from __future__ import annotations

import math

import pytest
import torch

from cxl_offload.ops.int4_weight import int4_from_awq, int4_from_gptq, int4_quantized
from cxl_offload.ops.linear import linear


def random_codes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed))


def word_of(codes: list[int]) -> int:
    """Eight codes, the first in the lowest bits, as an int32."""
    word = sum(code << 4 * place for place, code in enumerate(codes))
    return word - 2**32 if word >= 2**31 else word


def words(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Each eight codes of a row in a word; place ``i`` holds the code at ``order[i]``."""
    rows = [
        [word_of([row[at + place] for place in order]) for at in range(0, len(row), 8)]
        for row in codes.tolist()
    ]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (outputs, width), zeros and scales (groups, outputs), and what they are worth."""
    codes, zeros = random_codes(0, 16, 96), random_codes(1, 3, 16)
    scales = torch.rand(3, 16, generator=torch.Generator().manual_seed(2)).half()
    steps = scales.t().double().repeat_interleave(32, dim=1)
    worth = (codes - zeros.t().repeat_interleave(32, dim=1)) * steps
    return codes, zeros, scales, worth


@pytest.mark.parametrize("offset", [0, 1])
def test_gptq_checkpoints_are_worth_what_their_format_says(
    layer: tuple[torch.Tensor, ...], offset: int
) -> None:
    codes, zeros, scales, worth = layer
    order = tuple(range(8))
    stored = (zeros - offset) % 16
    zeros = stored + offset
    steps = scales.t().double().repeat_interleave(32, dim=1)
    worth = (codes - zeros.t().repeat_interleave(32, dim=1)) * steps
    made = int4_from_gptq(words(codes, order).t(), words(stored, order), scales, zero_offset=offset)
    torch.testing.assert_close(made.dequantized().double(), worth, rtol=1e-6, atol=0)


def test_awq_checkpoints_are_worth_what_their_format_says(
    layer: tuple[torch.Tensor, ...],
) -> None:
    codes, zeros, scales, worth = layer
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    made = int4_from_awq(words(codes.t(), order), words(zeros, order), scales)
    torch.testing.assert_close(made.dequantized().double(), worth, rtol=1e-6, atol=0)


def test_quantized_weights_are_within_half_a_step() -> None:
    weight = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    made = int4_quantized(weight, group=96)
    steps = (weight.unflatten(1, (2, 96)).amax(-1) - weight.unflatten(1, (2, 96)).amin(-1)) / 15
    off = (made.dequantized() - weight).abs().unflatten(1, (2, 96)).amax(-1)
    assert (off <= steps * 0.52 + 2e-3).all()
    assert torch.equal(int4_quantized(torch.ones(1, 32), 32).dequantized(), torch.ones(1, 32))


def test_codes_that_do_not_fit_are_refused(layer: tuple[torch.Tensor, ...]) -> None:
    codes, zeros, scales, _ = layer
    order = tuple(range(8))
    with pytest.raises(ValueError, match="do not fit"):
        int4_from_gptq(words(codes, order).t(), words(zeros, order)[:2], scales)
    with pytest.raises(ValueError, match="do not fit"):
        int4_from_awq(words(codes.t(), order).float(), words(zeros, order), scales)
    with pytest.raises(ValueError, match="groups of 64"):
        int4_quantized(torch.ones(2, 96), group=64)
    with pytest.raises(ValueError, match=r"torch\.int8 to quantize: give a float type"):
        int4_quantized(torch.ones(2, 64, dtype=torch.int8))
    for far in (torch.linspace(-1e6, 1e6, 64), torch.full((64,), 7e4), -torch.full((64,), 7e4)):
        with pytest.raises(ValueError, match=r"weights from .* float16, which ends at 65504"):
            int4_quantized(far[None])
        beside = torch.stack((far, torch.full((64,), math.inf), torch.full((64,), math.nan)))
        with pytest.raises(ValueError, match=r"weights from .* float16, which ends at 65504"):
            int4_quantized(beside)
    assert int4_quantized(torch.full((1, 64), math.nan)).groups.isnan().all()
    with pytest.raises(ValueError, match="zero_offset is 100000; it is 1"):
        int4_from_gptq(words(codes, order).t(), words(zeros, order), scales, zero_offset=100_000)
    with pytest.raises(
        ValueError, match=r"scales of up to 1e\+06: .* float16, which ends at 65504"
    ):
        int4_from_gptq(words(codes, order).t(), words(zeros, order), scales.float() + 1e6)
    with pytest.raises(ValueError, match="do not fit"):
        int4_from_gptq(words(codes, order).t(), words(zeros, order), scales.int())
    with pytest.raises(ValueError, match="do not fit"):
        int4_from_awq(torch.zeros(16, dtype=torch.int32), words(zeros, order), scales)
    with pytest.raises(ValueError, match="groups of 16 codes: give a multiple of 32"):
        int4_from_gptq(torch.zeros(4, 16, dtype=torch.int32), words(zeros, order)[:2], scales[:2])


def test_weights_of_any_layout_are_quantized_for_the_kernel() -> None:
    """Some checkpoints keep (width, outputs); codes of such a view have the rows of the kernel."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).t()
    made, x = int4_quantized(weight, 32), torch.eye(64)
    torch.testing.assert_close(linear(x, made).t(), made.dequantized())
    assert torch.equal(made.codes, int4_quantized(weight.contiguous(), 32).codes)


def test_layer_without_outputs_has_none() -> None:
    assert linear(torch.ones(2, 64), int4_quantized(torch.empty(0, 64), 32)).shape == (2, 0)


@pytest.mark.parametrize("isa", ["", "scalar"])
def test_errors_stay_below_those_of_products_before_their_steps(isa: str) -> None:
    """Also where one number of x in each group is far greater than the others."""
    made = int4_quantized(torch.randn(16, 512, generator=torch.Generator().manual_seed(1)), 128)
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(2))
    x[:, ::128] *= 1000
    codes = torch.stack((made.codes >> 4, made.codes & 15), -1).flatten(1).double()
    low, step = made.groups.double().repeat_interleave(128, dim=1).unbind(-1)
    size = x.double().abs() @ (codes * step + low.abs()).t()
    exact = x.double() @ made.dequantized().double().t()
    assert ((linear(x, made, isa=isa) - exact).abs() / size).max() < 1e-6
