"""Parts of a flat parameter that are updated before the step: the bits of one step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import cxl_offload
from cxl_offload.ops.optimizer import OnePassOptimizer

NUMEL = 5003


def flat(seed: int = 0) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)))
    param.grad = torch.zeros_like(param)
    return param


def gradient(step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 + step))


def at_once() -> None:
    pass


MADE: dict[str, Callable[..., OnePassOptimizer]] = {
    "adam": lambda params, **options: cxl_offload.CPUAdam(params, weight_decay=0.1, **options),
    "lion": lambda params, **options: cxl_offload.CPULion(params, **options),
    "adagrad": lambda params, **options: cxl_offload.CPUAdagrad(params, **options),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("seed", range(8))
def test_parts_in_any_order_and_a_step_for_the_rest_are_one_step(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    whole, parts = flat(), flat()
    late, early = MADE[kind]([whole]), MADE[kind]([parts], overlap=True)
    assert early.early_updates is not None
    for step in range(3):
        whole.grad = gradient(step)
        late.step()
        assert parts.grad is not None
        parts.grad.copy_(gradient(step))
        cuts = sorted(rng.sample(range(1, NUMEL), 2 * rng.randint(0, 6)))
        arrived = list(zip(cuts[::2], cuts[1::2], strict=True))
        for begin, end in rng.sample(arrived, len(arrived)):
            early.early_updates.part_arrived(parts, begin, end, ready=at_once)
        early.step()
        assert torch.equal(whole, parts)
        for name, value in late.state[whole].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(early.state[parts][name]))


def test_all_parts_leave_nothing_to_the_step_but_its_count() -> None:
    param = flat()
    optimizer = cxl_offload.CPUAdam([param], overlap=True)
    assert optimizer.early_updates is not None
    optimizer.early_updates.part_arrived(param, 0, 5000, ready=at_once)
    optimizer.early_updates.part_arrived(param, 5000, NUMEL, ready=at_once)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize(("begin", "end"), [(99, 101), (0, NUMEL), (150, 160), (199, 300)])
def test_second_gradient_for_an_element_is_refused(begin: int, end: int) -> None:
    param = flat()
    optimizer = cxl_offload.CPUAdam([param], overlap=True)
    assert optimizer.early_updates is not None
    optimizer.early_updates.part_arrived(param, 100, 200, ready=at_once)
    with pytest.raises(RuntimeError, match=f"second gradient for elements {begin} to {end - 1}"):
        optimizer.early_updates.part_arrived(param, begin, end, ready=at_once)
    optimizer.early_updates.part_arrived(param, 200, 300, ready=at_once)
    optimizer.step()


def test_gradient_that_does_not_come_is_an_error_of_the_step() -> None:
    param = flat()
    optimizer = cxl_offload.CPUAdam([param], overlap=True)
    assert optimizer.early_updates is not None

    def never() -> None:
        raise RuntimeError("the copy failed")

    optimizer.early_updates.part_arrived(param, 0, 10, ready=never)
    with pytest.raises(RuntimeError, match="the copy failed"):
        optimizer.step()


def test_gradients_that_were_used_are_not_cleared_without_a_step() -> None:
    param = flat()
    optimizer = cxl_offload.CPUAdam([param], overlap=True)
    assert optimizer.early_updates is not None
    optimizer.early_updates.part_arrived(param, 0, 10, ready=at_once)
    with pytest.raises(RuntimeError, match="gradients are to be cleared of 1 parameters"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def test_settings_that_change_before_the_step_are_an_error() -> None:
    param = flat()
    optimizer = cxl_offload.CPUAdam([param], overlap=True)
    assert optimizer.early_updates is not None
    optimizer.early_updates.part_arrived(param, 0, 10, ready=at_once)
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(RuntimeError, match="lr of a group was changed"):
        optimizer.step()
