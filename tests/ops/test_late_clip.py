"""Updates in the backward that are clipped by the norm of the step before."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.late_clip import NORM
from cxl_offload.ops.lion import CPULion

from .tensors import bits
from .test_overlap import Model, groups, picture, tokens, train

MOST = 0.05
MAKERS: list[Callable[..., Any]] = [CPUAdam, CPULion, CPUAdagrad]


def norm_of(model: torch.nn.Module) -> float:
    """In float64, of all gradients together."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return float(torch.cat([grad.double().flatten() for grad in grads]).norm())


def by_hand(model: Model, optimizer: Any, steps: range) -> list[float]:
    """The same without overlap: gradients are multiplied before the step; the norms."""
    norms: list[float] = []
    for step in steps:
        optimizer.zero_grad()
        model(tokens(step)).backward()
        norm = norm_of(model)
        before = norms[-1] if norms else norm
        optimizer.step(grad_scale=min(1.0, MOST / (before + 1e-6)))
        norms.append(norm)
    return norms


@pytest.mark.parametrize("make", MAKERS)
def test_every_step_is_scaled_by_the_norm_of_the_step_before(make: Callable[..., Any]) -> None:
    ours, theirs = Model(), Model()
    late = make(groups(ours), lr=0.01, overlap=True, late_max_norm=MOST)
    hand = make(groups(theirs), lr=0.01)
    train(ours, late, range(6))
    norms = by_hand(theirs, hand, range(6))
    assert min(norms) > MOST  # every step is clipped
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert late.param_groups[1][NORM] == pytest.approx(norms[-1], rel=1e-6)


def test_first_step_is_that_of_clip_grad_norm() -> None:
    ours, theirs = Model(), Model()
    train(ours, CPUAdam(groups(ours), overlap=True, late_max_norm=MOST), range(1))
    optimizer = CPUAdam(groups(theirs))
    theirs(tokens(0)).backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), MOST)
    optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_later_steps_are_updated_in_the_backward() -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    for step in range(2):
        before = bits(model.first.weight)
        optimizer.zero_grad()
        model(tokens(step)).backward()
        assert (bits(model.first.weight) != before) == (step > 0)
        optimizer.step()


def test_norm_below_the_most_changes_no_bit() -> None:
    ours, theirs = Model(), Model()
    late = CPUAdam(groups(ours), overlap=True, late_max_norm=1e6)
    plain = CPUAdam(groups(theirs))
    train(ours, late, range(4))
    train(theirs, plain, range(4))
    assert picture(ours, late) == picture(theirs, plain)


def test_accumulated_gradients_count_once() -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    train(model, optimizer, range(2), backwards=3)
    assert optimizer.param_groups[0][NORM] == pytest.approx(norm_of(model), rel=1e-6)


@pytest.mark.parametrize("how", ["checkpoint", "pickle", "copy"])
def test_training_resumes_with_the_same_bits(how: str) -> None:
    whole = Model()
    optimizer = CPUAdam(groups(whole), overlap=True, late_max_norm=MOST)
    train(whole, optimizer, range(3))
    if how == "checkpoint":
        model = Model()
        model.load_state_dict(whole.state_dict())
        resumed = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        again = pickle.loads(pickle.dumps((whole, optimizer)))
        model, resumed = again if how == "pickle" else copy.deepcopy((whole, optimizer))
    train(whole, optimizer, range(3, 6))
    train(model, resumed, range(3, 6))
    assert picture(model, resumed) == picture(whole, optimizer)


def test_checkpoint_of_a_run_without_it_waits_for_its_own_norm() -> None:
    model = Model()
    plain = CPUAdam(groups(model))
    train(model, plain, range(2))
    late = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    late.load_state_dict(plain.state_dict())
    train(model, late, range(2, 3))
    assert late.param_groups[0][NORM] == pytest.approx(norm_of(model), rel=1e-6)


@pytest.mark.parametrize("worth", [math.inf, math.nan])
def test_norm_that_is_no_number_is_not_taken_for_the_next_step(worth: float) -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), lr=0.0, overlap=True, late_max_norm=MOST)
    train(model, optimizer, range(1))
    handle = model.unused.register_hook(lambda grad: grad * worth)
    optimizer.zero_grad()
    (model(tokens(1)) + model.unused.sum()).backward()
    optimizer.step()
    handle.remove()
    assert optimizer.param_groups[0][NORM] is None
    train(model, optimizer, range(2, 3))
    assert optimizer.param_groups[0][NORM] == pytest.approx(norm_of(model), rel=1e-6)


def test_step_without_gradients_keeps_the_norm() -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    train(model, optimizer, range(1))
    kept = optimizer.param_groups[0][NORM]
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.param_groups[0][NORM] == kept


def test_a_refused_step_keeps_the_norm() -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    train(model, optimizer, range(1))
    kept = optimizer.param_groups[0][NORM]
    optimizer.zero_grad()
    model(tokens(1)).backward()
    model.unused.grad = torch.ones(3).to_sparse()
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()
    assert optimizer.param_groups[0][NORM] == kept


@pytest.mark.parametrize(
    "most",
    [
        0.0,
        -1.0,
        math.inf,
        math.nan,
        "1",
        1j,
        [1.0],
        True,
        pytest.param(10**400, id="huge"),
        torch.ones(2),
    ],
    ids=repr,
)
def test_norm_that_is_no_limit_is_refused(most: Any) -> None:
    with pytest.raises(ValueError, match=r"^late_max_norm [^\n]*above 0[^\n]*$"):
        CPUAdam(Model().parameters(), overlap=True, late_max_norm=most)


@pytest.mark.parametrize(
    "norm",
    [-1.0, -math.inf, math.inf, math.nan, "1", [1.0], True, pytest.param(10**400, id="huge")],
    ids=repr,
)
def test_checkpoint_with_a_norm_that_no_step_leaves_is_refused(norm: Any) -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    train(model, optimizer, range(2))
    saved, before = copy.deepcopy(optimizer.state_dict()), picture(model, optimizer)
    for group in saved["param_groups"]:
        group[NORM] = norm
    with pytest.raises(ValueError, match=rf"^{NORM} [^\n]*$"):
        optimizer.load_state_dict(saved)
    assert picture(model, optimizer) == before


@pytest.mark.parametrize("norm", [None, 0.0, torch.tensor(2.0)], ids=repr)
def test_checkpoint_with_a_norm_that_a_step_leaves_is_taken(norm: Any) -> None:
    model = Model()
    optimizer = CPUAdam(groups(model), overlap=True, late_max_norm=MOST)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group[NORM] = norm
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_without_overlap_it_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_grad_norm_"):
        CPUAdam(Model().parameters(), late_max_norm=1.0)


def test_part_of_a_parameter_is_refused() -> None:
    """Of a distributed tensor a process has a part, and the norm is that of all."""
    param = torch.nn.Parameter(torch.zeros(4))
    param._local_tensor = torch.zeros(2)  # type: ignore[attr-defined]
    param.to_local = lambda: param._local_tensor  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="all ranks"):
        CPUAdam([param], overlap=True, late_max_norm=1.0)
