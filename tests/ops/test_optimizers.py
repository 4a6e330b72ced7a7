"""The optimizer classes beside those of torch: steps, checkpoints, placement."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import cxl_offload
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion

from .oracle import f64

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = ((3, 5), (17,), (), (0,), (64, 33))


def parameters(dtype: torch.dtype = F32, seed: int = 0) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=source).to(dtype)) for s in SHAPES]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    source = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=source).to(param.dtype)


def train(
    optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range, **options: Any
) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step(**options)


def assert_close(params: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> None:
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)


def assert_same(params: list[torch.nn.Parameter], others: list[torch.nn.Parameter]) -> None:
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("adamw", [True, False])
def test_adam_follows_torch_over_groups(adamw: bool) -> None:
    mine, theirs = parameters(), parameters()
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1}

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0}]

    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    train(CPUAdam(groups(mine), adamw=adamw, **options), mine, range(20))
    train(kind(groups(theirs), **options), theirs, range(20))
    assert_close(mine, theirs)


def test_adam_skips_parameters_without_gradient() -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    before = params[1].clone()
    set_gradients(params, 0)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


def test_adam_scales_gradients_and_leaves_them_alone() -> None:
    mine, theirs = parameters(), parameters()
    first, second = CPUAdam(mine, lr=0.1, eps=1e-3), CPUAdam(theirs, lr=0.1, eps=1e-3)
    train(first, mine, range(3), grad_scale=0.25)
    for step in range(3):
        set_gradients(theirs, step)
        for param in theirs:
            assert param.grad is not None
            param.grad.mul_(0.25)
        second.step()
    assert_same(mine, theirs)
    set_gradients(theirs, 2)
    assert_same([p.grad for p in mine], [p.grad for p in theirs])  # type: ignore[misc]


def test_adam_writes_the_copies_that_are_given() -> None:
    params = parameters()
    copies = {param: torch.zeros(param.shape, dtype=BF16) for param in params[:3]}
    train(CPUAdam(params, lr=0.1), params, range(2), low_precision_copies=copies)
    for param, low in copies.items():
        assert torch.equal(low, param.detach().to(BF16))


def test_adam_returns_loss_of_closure_and_runs_hooks() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = CPUAdam([param], lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert seen == ["before", "after"]
    assert param.item() == pytest.approx(1.9)


def test_adam_works_with_a_learning_rate_schedule() -> None:
    mine, theirs = parameters(), parameters()
    for params, kind in ((mine, CPUAdam), (theirs, torch.optim.Adam)):
        optimizer = kind(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            train(optimizer, params, range(step, step + 1))
            schedule.step()
    assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_adam_resumes_from_its_checkpoint_bit_by_bit(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    straight = parameters(dtype)
    train(CPUAdam(straight, lr=0.1, state_dtype=state_dtype), straight, range(6))
    params = parameters(dtype)
    optimizer = CPUAdam(params, lr=0.1, state_dtype=state_dtype)
    train(optimizer, params, range(3))
    saved = through_file(optimizer.state_dict())
    resumed = CPUAdam(params, lr=0.7, state_dtype=state_dtype)
    resumed.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in resumed.state.values()} == {state_dtype}
    train(resumed, params, range(3, 6))
    assert_same(params, straight)


@pytest.mark.parametrize("back", [False, True], ids=["from-torch", "to-torch"])
@pytest.mark.parametrize("adamw", [True, False])
def test_adam_exchanges_checkpoints_with_torch(back: bool, adamw: bool) -> None:
    torch_kind = torch.optim.AdamW if adamw else torch.optim.Adam

    def make(params: list[torch.nn.Parameter], mine: bool) -> torch.optim.Optimizer:
        if mine:
            return CPUAdam(params, lr=0.1, weight_decay=0.1, adamw=adamw)
        return torch_kind(params, lr=0.1, weight_decay=0.1)

    straight = parameters()
    train(make(straight, mine=False), straight, range(6))
    params = parameters()
    first = make(params, mine=back)
    train(first, params, range(3))
    second = make(params, mine=not back)
    second.load_state_dict(through_file(first.state_dict()))
    train(second, params, range(3, 6))
    assert_close(params, straight)


def test_adam_loads_steps_that_are_integers_as_deepspeed_saves_them() -> None:
    params, straight = parameters(), parameters()
    train(CPUAdam(straight, lr=0.1), straight, range(4))
    optimizer = CPUAdam(params, lr=0.1)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    resumed = CPUAdam(params, lr=0.1)
    resumed.load_state_dict(saved)
    train(resumed, params, range(2, 4))
    assert_same(params, straight)


def test_adam_refuses_checkpoint_of_a_variant_that_it_lacks() -> None:
    params = parameters()
    other = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        CPUAdam(params).load_state_dict(other.state_dict())


def test_adam_states_live_where_the_placement_says() -> None:
    params = [torch.nn.Parameter(torch.ones(1 << 20))]
    optimizer = CPUAdam(params, lr=0.1, policy="bind:0")
    train(optimizer, params, range(1))

    def check() -> None:
        for name in optimizer.state_names:
            placement = cxl_offload.placement_of(optimizer.state[params[0]][name])
            assert placement.requested is not None
            assert placement.granted == {0: 4 << 20}

    check()
    optimizer.load_state_dict(optimizer.state_dict())
    check()


def test_adam_survives_deepcopy() -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    train(optimizer, params, range(2))
    twins, other = copy.deepcopy((params, optimizer))
    train(optimizer, params, range(2, 4))
    train(other, twins, range(2, 4))
    assert_same(params, twins)


def test_adam_takes_bfloat16_parameters_with_states_of_either_type() -> None:
    for state_dtype in (F32, BF16):
        params = parameters(BF16)
        optimizer = CPUAdam(params, lr=0.1, state_dtype=state_dtype)
        train(optimizer, params, range(1))
        # The first step of Adam is lr * sign(gradient), near enough.
        set_gradients(params, 0)
        starts = parameters(BF16)
        for param, start in zip(params, starts, strict=True):
            assert param.grad is not None
            expected = start - 0.1 * param.grad.sign()
            torch.testing.assert_close(param, expected, rtol=2**-7, atol=1e-2)
        assert optimizer.fp32_optimizer_states is (state_dtype is F32)


def test_adagrad_follows_torch() -> None:
    mine, theirs = parameters(), parameters()
    options = {
        "lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5,
    }  # fmt: skip
    optimizer = CPUAdagrad(mine, **options)
    train(optimizer, mine, range(10))
    train(torch.optim.Adagrad(theirs, **options), theirs, range(10))
    assert_close(mine, theirs)


def test_lion_matches_fp64() -> None:
    params = parameters()
    values = [f64(param) for param in params]
    means = [np.zeros_like(value) for value in values]
    train(CPULion(params, lr=0.1, betas=(0.9, 0.99), weight_decay=0.2), params, range(5))
    source = parameters()
    for step in range(5):
        set_gradients(source, step)
        for i, param in enumerate(source):
            assert param.grad is not None
            grad = f64(param.grad)
            direction = np.sign(0.9 * means[i] + 0.1 * grad)
            values[i] = values[i] * (1 - 0.1 * 0.2) - 0.1 * direction
            means[i] = 0.99 * means[i] + 0.01 * grad
    for param, value in zip(params, values, strict=True):
        np.testing.assert_allclose(f64(param), value, rtol=1e-5, atol=1e-6)


def test_lion_passes_on_what_is_not_a_number_and_keeps_zero() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([float("nan"), 0.0, -5.0])
    CPULion([param], lr=0.5).step()
    assert param[0].isnan()
    assert param[1:].tolist() == [1.0, 1.5]
