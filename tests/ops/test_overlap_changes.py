"""What changes between a backward that updates and its step is an error, and nothing else is."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion

from .tensors import bits
from .test_overlap import Model, tokens


@pytest.mark.parametrize(
    "change",
    [
        lambda grad: grad.data.clamp_(-1, 1),
        lambda grad: grad.data.view(torch.uint8).numpy().__setitem__(slice(None), 0),
        lambda grad: grad.data.__setitem__((-1, -1), 5),
    ],
    ids=["data", "numpy", "one number"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_that_change_behind_autograds_back_are_refused(
    change: Callable[[torch.Tensor], None], dtype: torch.dtype
) -> None:
    param = nn.Parameter(torch.ones(9, 7, dtype=dtype))
    optimizer = CPUAdam([param], overlap=True)
    (param * 100).sum().backward()
    assert param.grad is not None
    change(param.grad)
    with pytest.raises(RuntimeError, match="was changed or dropped after"):
        optimizer.step()


def test_nan_in_a_gradient_is_no_change() -> None:
    param = nn.Parameter(torch.ones(9))
    optimizer = CPUAdam([param], overlap=True)
    (param * math.nan).sum().backward()
    optimizer.step()
    assert param.isnan().all()


def test_parameters_that_are_written_before_the_step_are_refused() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), overlap=True)
    saved = copy.deepcopy(model.state_dict())
    for write in (model.load_state_dict, lambda _: model.first.bias.detach().fill_(5)):
        model(tokens(0)).backward()
        write(saved)
        with pytest.raises(RuntimeError, match="was written after the backward had updated it"):
            optimizer.step()
        optimizer.zero_grad()
    model(tokens(1)).backward()
    optimizer.step()


def test_states_are_not_loaded_between_backward_and_step() -> None:
    model = Model()
    optimizer = CPUAdam(model.parameters(), overlap=True)
    saved = copy.deepcopy(optimizer.state_dict())
    model(tokens(0)).backward()
    with pytest.raises(RuntimeError, match="states are to be loaded of 5 parameters"):
        optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_two_optimizers_do_not_update_a_parameter_in_one_backward() -> None:
    """Nothing is written where they would; one that is held, or gone, is none of the two."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    head, whole = (
        CPUAdam(layers[1].parameters(), overlap=True),
        CPULion(layers.parameters(), overlap=True),
    )
    before = [bits(param) for param in layers.parameters()]
    with pytest.raises(RuntimeError, match=r"two optimizers would update a parameter of shape"):
        layers(torch.ones(4)).sum().backward()
    assert [bits(param) for param in layers.parameters()] == before
    layers.zero_grad()
    with head.accumulate():
        layers(torch.ones(4)).sum().backward()
    whole.param_groups[0]["lr"] = whole.param_groups[0]["lr"]
    whole.step()
    whole.zero_grad()
    head.param_groups[0]["lr"] = 0.5  # it had no backward of its own yet
    with whole.accumulate():
        layers(torch.ones(4)).sum().backward()
    head.step()
    head.zero_grad()
    layers.zero_grad()
    del head  # a notebook's cell that is run again
    gc.collect()
    layers(torch.ones(4)).sum().backward()
    whole.step()


def test_a_rate_in_a_tensor_that_a_scheduler_changes_is_seen() -> None:
    param = nn.Parameter(torch.ones(5))
    optimizer = CPUAdam([param], lr=torch.tensor(0.1), overlap=True)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        param.sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    param.sum().backward()
    scheduler.step()
    with pytest.raises(RuntimeError, match="lr of a group was changed after"):
        optimizer.step()


def test_parameters_taken_out_of_a_group_before_the_step_are_refused() -> None:
    layer = nn.Linear(3, 2)
    optimizer = CPUAdam(layer.parameters(), overlap=True)
    layer(torch.ones(3)).sum().backward()
    optimizer.param_groups[0]["params"] = [layer.bias]
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\) was taken out of its group"):
        optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_pieces_of_flat_buffers_are_updated(overlap: bool) -> None:
    """Autograd counts a write to one of them as one to all."""
    flat, grads = torch.linspace(-1, 1, 20), torch.zeros(20)
    pieces = [nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:])]
    pieces[0].grad, pieces[1].grad = grads[:12].view(3, 4), grads[12:]
    optimizer = CPUAdam(pieces, lr=0.1, overlap=overlap)
    for _ in range(3):
        grads.zero_()
        ((pieces[0].sum(0) * 2).sum() + pieces[1].square().sum()).backward()
        optimizer.step()
    expected = [
        each.detach().clone().requires_grad_() for each in torch.linspace(-1, 1, 20).split(12)
    ]
    plain = CPUAdam(expected, lr=0.1)
    for _ in range(3):
        plain.zero_grad()
        (expected[0].sum() * 2 + expected[1].square().sum()).backward()
        plain.step()
    assert torch.equal(flat, torch.cat([each.detach() for each in expected]))


def test_parameters_may_be_swapped_after_a_step() -> None:
    layer = nn.Linear(3, 2)
    optimizer = CPUAdam(layer.parameters(), overlap=True)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.zeros(2, 3)))
    assert layer.weight.eq(0).all()
