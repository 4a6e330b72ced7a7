"""Steps that the core reads from torch in one call, and what it leaves to Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from cxl_offload import _C, CPUAdam
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.update import run_plain

from .tensors import bits

Params = list[torch.nn.Parameter]

CHOICES: dict[str, tuple[type[OnePassOptimizer], torch.dtype, dict[str, Any]]] = {
    "adam": (CPUAdam, torch.float32, {}),
    "adam uphill": (CPUAdam, torch.float32, {"maximize": True, "weight_decay": 0.1}),
    "adam bf16": (CPUAdam, torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "adam bf16 at random": (
        CPUAdam,
        torch.bfloat16,
        {"state_dtype": torch.bfloat16, "rounding_seed": 7},
    ),
    "adam float32 with a seed": (CPUAdam, torch.float32, {"rounding_seed": 7}),
    "adam codes": (CPUAdam, torch.float32, {"state_dtype": torch.uint8}),
    "adagrad": (CPUAdagrad, torch.float16, {}),
    "lion": (CPULion, torch.float32, {}),
    "lion codes": (CPULion, torch.bfloat16, {"state_dtype": torch.uint8}),
}
choices = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())


def _made(choice: tuple[type[OnePassOptimizer], torch.dtype, dict[str, Any]]) -> OnePassOptimizer:
    kind, dtype, options = choice
    source = torch.Generator().manual_seed(3)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=source).to(dtype))
        for shape in ((5, 3), (300,), (), (0,), (2, 64, 2))
    ]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    return kind(groups, lr=0.01, **options)  # type: ignore[call-arg]


def _params(optimizer: OnePassOptimizer) -> Params:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _give_gradients(optimizer: OnePassOptimizer, turn: int) -> None:
    source = torch.Generator().manual_seed(turn)
    for at, param in enumerate(_params(optimizer)):
        grad = torch.randn(param.shape, generator=source).to(param.dtype)
        param.grad = grad if turn >= at % 3 else None  # some begin later


def _before_a_step() -> OnePassOptimizer:
    """One whose parameters all have states and gradients."""
    optimizer = _made(CHOICES["adam"])
    for turn in (3, 4):
        _give_gradients(optimizer, turn)
        optimizer.step()
    _give_gradients(optimizer, 5)
    return optimizer


def _read(optimizer: OnePassOptimizer) -> _C.PlainStep:
    """Its step, as the core has read it."""
    given = [(param, group, None) for group in optimizer.param_groups for param in group["params"]]
    step = optimizer._plain_step(given, 1.0)
    assert step is not None
    return step


def _everything(optimizer: OnePassOptimizer) -> list[bytes]:
    found = []
    for param in _params(optimizer):
        states = optimizer.state[param]
        found += [bits(param.detach()), *(bits(states[name]) for name in sorted(states))]
    return found


class _Counting:
    """Counts the steps that the core read by itself; ``refused``: it is not asked."""

    def __init__(self, optimizer: OnePassOptimizer, *, refused: bool = False) -> None:
        self.read = 0
        self.asked = 0
        plainly = optimizer._plain_step

        def counted(given: Sequence[Any], grad_scale: float) -> Any:
            self.asked += 1
            step = None if refused else plainly(given, grad_scale)
            self.read += step is not None
            return step

        optimizer._plain_step = counted  # type: ignore[method-assign]


@choices
def test_both_ways_come_to_the_same_bits(
    choice: tuple[type[OnePassOptimizer], torch.dtype, dict[str, Any]],
) -> None:
    by_core, by_python = _made(choice), _made(choice)
    core, python = _Counting(by_core), _Counting(by_python, refused=True)
    for turn in range(6):
        for optimizer in (by_core, by_python):
            _give_gradients(optimizer, turn)
            optimizer.step(grad_scale=0.5)
    assert _everything(by_core) == _everything(by_python)
    # In the first three steps some parameter has no states yet.
    assert (core.asked, core.read) == (6, 3)
    assert (python.asked, python.read) == (6, 0)


def test_copies_are_written_by_the_core_too() -> None:
    by_core, by_python = _made(CHOICES["adam"]), _made(CHOICES["adam"])
    core = _Counting(by_core)
    _Counting(by_python, refused=True)
    kept = []
    for optimizer in (by_core, by_python):
        copies = {
            param: torch.empty(param.shape, dtype=torch.bfloat16) for param in _params(optimizer)
        }
        for turn in (3, 4):
            _give_gradients(optimizer, turn)
            optimizer.step(low_precision_copies=copies)
        kept.append([bits(copy) for copy in copies.values()])
    assert kept[0] == kept[1]
    assert core.read == 1


def test_what_is_written_has_a_new_version_and_nothing_else_has() -> None:
    optimizer = _before_a_step()
    core = _Counting(optimizer)
    written = [each for param in _params(optimizer) for each in optimizer.state[param].values()]
    written += _params(optimizer)
    grads = [param.grad for param in _params(optimizer) if param.grad is not None]
    before = [tensor._version for tensor in written]
    others = [tensor._version for tensor in grads]
    optimizer.step()
    assert core.read == 1
    assert [tensor._version for tensor in written] == [version + 1 for version in before]
    assert [tensor._version for tensor in grads] == others


def _one_after_two_steps(value: object) -> CPUAdam:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = CPUAdam([param], lr=0.1)
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    optimizer.state[param]["step"] = value
    return optimizer


LEFT_TO_PYTHON: dict[str, Callable[[], object]] = {
    "a number": lambda: 2,
    "a double": lambda: torch.tensor(2.0, dtype=torch.float64),
    "an integer": lambda: torch.tensor(2),
    "a view that is negated": lambda: torch._neg_view(torch.tensor(-2.0)),
    "sparse": lambda: torch.tensor(2.0).to_sparse(),
}


@pytest.mark.parametrize("made", LEFT_TO_PYTHON.values(), ids=LEFT_TO_PYTHON.keys())
def test_steps_that_the_core_does_not_count_are_counted_by_python(
    made: Callable[[], object],
) -> None:
    optimizer = _one_after_two_steps(made())
    (param,) = _params(optimizer)
    core = _Counting(optimizer)
    optimizer.step()
    assert core.read == 0
    assert int(optimizer.state[param]["step"]) == 3
    expected = _one_after_two_steps(torch.tensor(2.0))
    expected.step()
    assert bits(param.detach()) == bits(_params(expected)[0].detach())


def test_tensors_made_for_inference_are_written_like_others() -> None:
    """They have no versions, so torch refuses to count one more."""
    optimizer = _one_after_two_steps(torch.inference_mode()(torch.tensor)(2.0))
    (param,) = _params(optimizer)
    with torch.inference_mode():
        optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].clone()
    versions = param._version, optimizer.state[param]["exp_avg_sq"]._version
    core = _Counting(optimizer)
    optimizer.step()
    assert core.read == 1
    assert int(optimizer.state[param]["step"]) == 3
    assert param._version > versions[0]
    assert optimizer.state[param]["exp_avg_sq"]._version > versions[1]
    expected = _one_after_two_steps(torch.tensor(2.0))
    expected.step()
    assert bits(param.detach()) == bits(_params(expected)[0].detach())


@pytest.mark.parametrize("value", [float("nan"), -1.0, 2.5, float("inf"), 2.0**63])
def test_a_count_that_is_none_is_refused_and_nothing_is_written(value: float) -> None:
    optimizer = _one_after_two_steps(torch.tensor(value))
    before = _everything(optimizer)
    with pytest.raises(ValueError, match="it must be a whole number of steps"):
        optimizer.step()
    assert _everything(optimizer) == before


def test_an_error_of_a_later_parameter_leaves_all_as_they_were() -> None:
    optimizer = _before_a_step()
    last = _params(optimizer)[-1]
    optimizer.state[last]["exp_avg"] = torch.zeros(3)
    before = _everything(optimizer)
    with pytest.raises(ValueError, match="exp_avg has shape"):
        optimizer.step()
    assert _everything(optimizer) == before


def test_tensors_live_until_the_step_that_read_them_has_gone() -> None:
    optimizer = _before_a_step()
    step = _read(optimizer)
    param = _params(optimizer)[0]
    assert param.grad is not None
    grad = weakref.ref(param.grad)
    param.grad = None
    assert grad() is not None
    del step
    assert grad() is None


def test_whole_gradients_that_arrive_in_the_backward_are_read_by_the_core() -> None:
    params = [torch.nn.Parameter(torch.randn(7)) for _ in range(3)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
    early, late = CPUAdam(params, lr=0.1, overlap=True), CPUAdam(theirs, lr=0.1)
    core = _Counting(early)
    for _ in range(3):
        for optimizer in (early, late):
            optimizer.zero_grad()
            torch.cat(_params(optimizer)).square().sum().backward()
            optimizer.step()
    assert core.read == core.asked >= 6
    assert [bits(param.detach()) for param in params] == [bits(each.detach()) for each in theirs]


def _shrunk(step: torch.Tensor, nbytes: int) -> torch.Tensor:
    step.untyped_storage().resize_(nbytes)
    return step


@pytest.mark.parametrize("nbytes", [0, 2])
def test_a_step_without_its_memory_is_refused_as_other_states_are(nbytes: int) -> None:
    optimizer = _one_after_two_steps(_shrunk(torch.tensor(2.0), nbytes))
    (param,) = _params(optimizer)
    before = bits(param.detach())
    with pytest.raises(ValueError, match=f"needs 4 bytes of its storage, which has {nbytes}"):
        optimizer.step()
    assert bits(param.detach()) == before


ALIASES: dict[str, Callable[[CPUAdam], torch.Tensor]] = {
    "a parameter": lambda optimizer: _params(optimizer)[0].detach(),
    "a gradient": lambda optimizer: cast("torch.Tensor", _params(optimizer)[0].grad),
    "a state": lambda optimizer: optimizer.state[_params(optimizer)[0]]["exp_avg"],
}


@pytest.mark.parametrize("refused", [False, True], ids=["core", "python"])
@pytest.mark.parametrize("other", ALIASES.values(), ids=ALIASES.keys())
def test_a_step_is_not_counted_in_the_memory_of_a_tensor(
    other: Callable[[CPUAdam], torch.Tensor], refused: bool
) -> None:
    optimizer = _one_after_two_steps(torch.tensor(2.0))
    _Counting(optimizer, refused=refused)
    tensor = other(optimizer)
    tensor.fill_(2.0)
    optimizer.state[_params(optimizer)[0]]["step"] = tensor[3]
    before = _everything(optimizer)
    with pytest.raises(ValueError, match="overlaps with"):
        optimizer.step()
    assert _everything(optimizer) == before


@pytest.mark.parametrize("refused", [False, True], ids=["core", "python"])
def test_parameters_may_share_the_tensor_that_counts_their_steps(refused: bool) -> None:
    optimizer = _made(CHOICES["adam"])
    shared = torch.tensor(0.0)
    for turn in (3, 4, 5):
        _give_gradients(optimizer, turn)
        optimizer.step()
        for param in _params(optimizer):
            optimizer.state[param]["step"] = shared
        shared.fill_(turn - 2)
    core = _Counting(optimizer, refused=refused)
    optimizer.step()
    assert shared.item() == 4
    assert core.read == (not refused)


def test_states_of_a_class_of_their_own_are_read_as_that_class_says() -> None:
    class Other(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return other if name == "exp_avg" else super().__getitem__(name)

    optimizer = _one_after_two_steps(torch.tensor(2.0))
    other = torch.zeros(4)
    (param,) = _params(optimizer)
    optimizer.state[param] = Other(optimizer.state[param])
    optimizer.step()
    assert other[0] != 0


def test_memory_that_another_thread_replaces_lives_until_the_step_has_gone() -> None:
    optimizer = _before_a_step()
    step = _read(optimizer)
    param = _params(optimizer)[0]
    replaced = weakref.ref(param.untyped_storage())
    param.data = torch.zeros_like(param)
    assert replaced() is not None
    run_plain(step, threads=1)
    assert not param.any()
    del step
    assert replaced() is None
