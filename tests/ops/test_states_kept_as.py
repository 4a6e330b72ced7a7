"""The type of an optimizer's states, chosen after it was made and before they are."""

from __future__ import annotations

import pytest
import torch

from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam


def stepped(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    param.grad = torch.linspace(-1, 1, param.numel())
    optimizer.step()
    return param.detach().clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_steps_are_those_of_an_optimizer_made_so(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.ones(300)) for _ in range(3)]
    later, made, wide = CPUAdam([params[0]]), None, CPUAdam([params[2]])
    later.keep_states_as(dtype, rounding_seed=5)
    made = CPUAdam([params[1]], state_dtype=dtype, rounding_seed=5)
    for _ in range(3):
        values = [
            stepped(each, param) for each, param in zip((later, made, wide), params, strict=True)
        ]
        assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])  # the control: states of float32 step otherwise
    assert later.state_dtype is dtype
    assert not later.fp32_optimizer_states


def test_a_seed_that_was_given_stays() -> None:
    optimizer = CPUAdam([torch.nn.Parameter(torch.ones(4))], rounding_seed=9)
    optimizer.keep_states_as(torch.bfloat16)
    assert optimizer.rounding_seed == 9


def test_states_that_are_there_are_not_changed() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param])
    stepped(optimizer, param)
    with pytest.raises(ValueError, match="float32 already; load them"):
        optimizer.keep_states_as(torch.uint8)
    assert optimizer.state_dtype is torch.float32


def test_types_that_a_class_does_not_have_are_refused() -> None:
    optimizer = CPUAdagrad([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match=r"state_dtype torch\.uint8"):
        optimizer.keep_states_as(torch.uint8)
    assert optimizer.state_dtype is torch.float32
