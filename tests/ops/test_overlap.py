"""Updates that begin in the backward: the same bits, and no silent difference."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.beside import OneThread
from cxl_offload.ops.lion import CPULion

from ..placement.child import run_in_child
from .tensors import bits

ROOT = Path(__file__).parents[2]
WIDTH = 48


class Model(nn.Module):
    """Two layers, and an embedding that is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.last(torch.tanh(self.first(self.embed(tokens)))))
        logits = hidden @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits, tokens.roll(1))


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(step))


def groups(model: Model) -> list[dict[str, Any]]:
    small = [model.first.bias, model.last.bias, model.unused]
    large = [model.embed.weight, model.first.weight, model.last.weight]
    return [{"params": large}, {"params": small, "lr": 0.3, "maximize": True}]


def train(model: nn.Module, optimizer: Any, steps: range, *, backwards: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(backwards - 1):
            with optimizer.accumulate():
                model(tokens(100 * step + part)).backward()
        model(tokens(step)).backward()
        optimizer.step()


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    params = list(model.parameters())
    states = [
        [bits(optimizer.state[param][name]) for name in sorted(optimizer.state[param])]
        for param in params
        if param in optimizer.state
    ]
    return [[bits(param) for param in params], states]


@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("kind", [CPUAdam, CPUAdagrad, CPULion])
def test_bits_are_those_of_a_step_after_the_backward(kind: type[Any], backwards: int) -> None:
    pictures = []
    for overlap in (False, True):
        model = Model()
        optimizer = kind(groups(model), lr=0.1, overlap=overlap)
        train(model, optimizer, range(4), backwards=backwards)
        pictures.append(picture(model, optimizer))
    assert pictures[0] == pictures[1]


def test_parameters_change_in_the_backward_on_a_thread_beside_it() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    before = bits(model.last.weight)
    seen: list[bool] = []

    def look(_: torch.Tensor) -> None:
        """In the backward of the first layer: the last one is updated without our help."""
        end = time.monotonic() + 300
        while time.monotonic() < end and not seen:
            if bits(model.last.weight) != before:
                seen.append(threading.current_thread() is threading.main_thread())
            time.sleep(0.001)

    model.first.weight.register_hook(look)
    model(tokens(0)).backward()
    assert seen == [True]
    after = [bits(param) for param in model.parameters()]
    optimizer.step()
    assert [bits(param) for param in model.parameters()] == after


def test_second_gradient_without_accumulate_is_refused() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    model(tokens(0)).backward()
    with pytest.raises(RuntimeError, match="second gradient for a parameter of shape"):
        model(tokens(1)).backward()
    with pytest.raises(RuntimeError, match="changed or dropped after"):
        optimizer.step()


def test_gradients_that_change_before_the_step_are_refused() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    model(tokens(0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    with pytest.raises(RuntimeError, match="changed or dropped after the parameter"):
        optimizer.step()
    train(model, optimizer, range(1, 2))


def test_gradients_that_are_replaced_before_the_step_are_refused() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1, overlap=True)
    (param * 2).sum().backward()
    param.grad = torch.zeros(4)  # its version is that of the one that was used
    with pytest.raises(RuntimeError, match="changed or dropped after the parameter"):
        optimizer.step()


def test_gradients_that_are_dropped_and_settings_that_change_before_the_step_are_refused() -> None:
    for change, message in (
        (lambda param, _: setattr(param, "grad", None), "dropped"),
        (lambda _, group: group.update(lr=0.0), "lr of a group was changed"),
        (lambda _, group: group.update(betas=(0.5, 0.9)), "betas of a group"),
    ):
        param = nn.Parameter(torch.ones(4))
        optimizer = CPUAdam([param], lr=0.1, overlap=True)
        (param * 2).sum().backward()
        change(param, optimizer.param_groups[0])
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        (param * 2).sum().backward()  # goes on
        optimizer.step()


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_scaled_gradients_are_refused(factor: float, unscaled: bool) -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1, overlap=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((param * factor).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="a GradScaler"):
        scaler.step(optimizer)


def test_scaled_gradients_are_used_without_overlap() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)  # leaves the second step out
        scaler.update()
    assert torch.equal(optimizer.state[param]["exp_avg"], torch.full((4,), 0.1))
    assert param.isfinite().all()


@pytest.mark.parametrize("late", [{"grad_scale": 0.5}, {"low_precision_copies": "copy"}], ids=str)
def test_what_comes_too_late_is_refused(late: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1, overlap=True)
    if "low_precision_copies" in late:
        late = {"low_precision_copies": {param: torch.ones(4, dtype=torch.bfloat16)}}
    with pytest.raises(ValueError, match="come too late with overlap=True"):
        optimizer.step(**late)


def test_backward_that_needs_the_old_value_is_refused_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(4))
    first = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([weight], lr=0.1, overlap=True)
    hidden = first * weight.detach()  # its backward needs the weight, and gives it no gradient
    loss = (hidden * weight).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def test_error_of_an_update_ends_the_backward() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1, overlap=True)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr is -1"):
        param.square().sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "twin", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_overlap_their_own_parameters(twin: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    other, others = twin((model, optimizer))
    before = [bits(param) for param in model.parameters()]
    other(tokens(7)).backward()
    assert [bits(param) for param in other.parameters()] != before
    assert [bits(param) for param in model.parameters()] == before
    others.step()
    model(tokens(7)).backward()
    optimizer.step()
    assert picture(other, others) == picture(model, optimizer)


def test_loading_goes_on_with_the_states_of_the_checkpoint() -> None:
    pictures = []
    for overlap in (False, True):
        model = Model()
        optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=overlap)
        train(model, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, range(2, 4))
        optimizer.load_state_dict(saved)
        train(model, optimizer, range(4, 6))
        pictures.append(picture(model, optimizer))
    assert pictures[0] == pictures[1]


def test_optimizer_that_is_dropped_leaves_its_parameters_alone() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    train(model, optimizer, range(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    before = [bits(param) for param in model.parameters()]
    model(tokens(3)).backward()
    assert [bits(param) for param in model.parameters()] == before


def test_frozen_and_added_parameters_are_trained_when_they_have_gradients() -> None:
    model = Model()
    model.first.weight.requires_grad_(False)
    optimizer = CPUAdam([model.first.weight], lr=0.1, overlap=True)
    optimizer.add_param_group({"params": [model.last.weight]})
    start = [bits(model.first.weight), bits(model.last.weight)]
    train(model, optimizer, range(1))
    assert [bits(model.first.weight) == start[0], bits(model.last.weight) == start[1]] == [
        True,
        False,
    ]
    model.first.weight.requires_grad_(True)
    train(model, optimizer, range(1, 2))
    assert bits(model.first.weight) != start[0]


@pytest.mark.slow(reason="trains in a process that forks")
def test_forked_child_overlaps_on_a_thread_of_its_own() -> None:
    """It would wait for ever for the thread of its parent.

    In a process of its own: torch refuses a backward pass in a child once autograd has had threads.
    """
    code = f"from {__name__} import train_in_a_forked_child as run; run()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=600)


def train_in_a_forked_child() -> None:
    torch.set_num_threads(1)  # torch's own layers wait for OpenMP's threads in a child
    model = Model()
    optimizer = CPUAdam(model.parameters(), lr=0.1, overlap=True)
    train(model, optimizer, range(2))
    twins, other = copy.deepcopy((model, optimizer))
    train(twins, other, range(2, 4))

    def child() -> None:
        signal.alarm(60)
        train(model, optimizer, range(2, 4))
        assert picture(model, optimizer) == picture(twins, other)

    run_in_child(child)


def test_update_that_the_parent_has_not_made_is_an_error_in_its_child() -> None:
    thread = OneThread("slow")
    go = threading.Event()
    future = thread.submit(go.wait, 60)
    done = thread.submit(int, "7")

    def child() -> None:
        signal.alarm(60)
        with pytest.raises(RuntimeError, match="slow: begun by the process that forked"):
            future.result()
        assert thread.submit(int, "8").result() == 8

    run_in_child(child)
    go.set()
    assert future.result()
    assert done.result() == 7


class Failing(torch.autograd.Function):
    """Fails in the backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("as the test asked")


def test_backward_that_fails_waits_for_its_updates_and_the_step_goes_on() -> None:
    layers = [nn.Linear(700, 700, bias=False) for _ in range(4)]
    optimizer = CPUAdam([layer.weight for layer in layers], lr=0.1, overlap=True)
    y = Failing.apply(torch.ones(1, 700, requires_grad=True))
    for layer in layers:
        y = layer(y)
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    then = [layer.weight.detach().clone() for layer in layers]
    time.sleep(0.2)
    assert all(torch.equal(a, layer.weight) for a, layer in zip(then, layers, strict=True))
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert [int(optimizer.state[layer.weight]["step"]) for layer in layers] == [1] * 4
    assert all(torch.equal(a, layer.weight) for a, layer in zip(then, layers, strict=True))
