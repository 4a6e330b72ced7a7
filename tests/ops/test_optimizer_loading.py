"""Checkpoints into the optimizer classes: all of one, or nothing, and in the tier of the states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.offload import offload_optimizer

from ..memory.machines import simulated_memory
from .tensors import bits
from .test_optimizers import assert_same, parameters, train

Damage = Callable[[dict[str, Any]], Any]


@pytest.fixture
def session() -> Iterator[Session]:
    """Two DRAM nodes and a CXL node, simulated."""
    made = simulated_memory()
    with cxl_offload.use(made):
        yield made


def trained(steps: int = 2, **options: Any) -> tuple[list[torch.nn.Parameter], CPUAdam]:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1, **options)
    train(optimizer, params, range(steps))
    return params, optimizer


def picture(optimizer: torch.optim.Optimizer) -> Any:
    """Everything that a load may change, as bytes and plain values."""
    states = [
        {k: bits(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    added_by_torch = ("params", "differentiable")
    groups = [
        {key: value for key, value in group.items() if key not in added_by_torch}
        for group in optimizer.param_groups
    ]
    return states, copy.deepcopy(groups), len(optimizer.state)


def _set(key: int, name: str, value: Any) -> Damage:
    return lambda saved: saved["state"][key].__setitem__(name, value)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "one-element": (_set(4, "exp_avg", torch.zeros(1)), r"exp_avg has shape \(1,\)"),
    "row-of-it": (_set(4, "exp_avg_sq", torch.zeros(33)), r"exp_avg_sq has shape \(33,\)"),
    "no-state": (lambda s: s["state"][4].pop("exp_avg"), "no exp_avg: a checkpoint of another"),
    "no-step": (lambda s: s["state"][4].pop("step"), "no step"),
    "step-of-many": (_set(4, "step", torch.zeros(2)), "one number"),
    "step-of-nothing": (_set(4, "step", float("nan")), "whole number"),
    "step-below-zero": (_set(4, "step", torch.tensor(-1.0)), "whole number"),
    "no-tensor": (_set(4, "exp_avg", [0.0]), "must be a tensor"),
    "integers": (_set(4, "exp_avg", torch.zeros(64, 33, dtype=torch.int32)), "floating-point"),
    "no-bytes": (_set(4, "exp_avg", torch.zeros(64, 33, device="meta")), "on meta"),
    "setting": (lambda s: s["param_groups"][0].update(betas=(2.0, 0.9)), "beta1 is 2"),
    "variant": (lambda s: s["param_groups"][0].update(amsgrad=True), "amsgrad"),
    "fewer": (lambda s: s["param_groups"][0]["params"].pop(), r"groups of \[4\] parameters"),
    "no-groups": (lambda s: s.pop("param_groups"), "no optimizer's checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_refused_checkpoint_changes_nothing(damage: str) -> None:
    _, source = trained(3)
    saved = copy.deepcopy(source.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    spoil, message = DAMAGES[damage]
    spoil(saved)
    _, optimizer = trained(2)
    before = picture(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert picture(optimizer) == before


def test_full_tier_refuses_a_checkpoint_and_changes_nothing() -> None:
    with cxl_offload.use(simulated_memory((1 << 30, 1 << 30, 21 << 20))):
        param = torch.nn.Parameter(torch.zeros(1 << 19))
        optimizer = CPUAdam([param], lr=0.1, policy="bind:2")  # 4 of 5 MiB: 16 are kept back
        train(optimizer, [param], range(1))
        before = picture(optimizer)
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert picture(optimizer) == before


def test_hooks_change_what_is_loaded_and_see_the_result() -> None:
    params, source = trained()
    saved = source.state_dict()
    optimizer = CPUAdam(params, lr=0.5)
    seen: list[Any] = []

    def rename(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = {
            key: {name.removeprefix("old_"): value for name, value in values.items()}
            for key, values in given["state"].items()
        }
        return {**given, "state": state}

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(
        lambda loaded: seen.append(loaded.state[params[0]]["exp_avg"].clone())
    )
    named = {
        key: {f"old_{name}": value for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": named})
    assert picture(optimizer)[0] == picture(source)[0]
    assert torch.equal(seen[0], source.state[params[0]]["exp_avg"])


def test_loaded_states_share_nothing_with_the_checkpoint() -> None:
    params, source = trained()
    saved = source.state_dict()
    kept = copy.deepcopy(saved)
    other = parameters(seed=5)
    optimizer = CPUAdam(other, lr=0.1)
    optimizer.load_state_dict(saved)
    train(optimizer, other, range(3))
    for key, values in kept["state"].items():
        for name, value in values.items():
            assert torch.equal(saved["state"][key][name], value)
    assert params[0] in source.state


def test_snapshot_survives_loading_another_checkpoint() -> None:
    """As in torch: a snapshot's tensors are those that were the states when it was made."""
    _, optimizer = trained(2)
    snapshot = optimizer.state_dict()
    before = picture(optimizer)
    optimizer.load_state_dict(copy.deepcopy(trained(5)[1].state_dict()))
    assert picture(optimizer) != before
    optimizer.load_state_dict(snapshot)
    assert picture(optimizer) == before


def test_checkpoint_without_states_makes_a_beginning() -> None:
    _, optimizer = trained()
    optimizer.load_state_dict(CPUAdam(parameters(), lr=0.3).state_dict())
    assert len(optimizer.state) == 0
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_lion_loads_checkpoints_that_count_no_steps() -> None:
    params = parameters()
    optimizer = CPULion(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        del values["step"]
    optimizer.load_state_dict(saved)
    train(optimizer, params, range(1))


def test_adagrad_refuses_the_states_of_adam() -> None:
    _, source = trained()
    saved = source.state_dict()
    saved["param_groups"][0].update(lr_decay=0.0)
    with pytest.raises(ValueError, match="no sum: a checkpoint of another optimizer"):
        CPUAdagrad(parameters()).load_state_dict(saved)


def granted(optimizer: torch.optim.Optimizer) -> set[tuple[int, ...]]:
    return {
        tuple(cxl_offload.placement_of(state["exp_avg"]).granted)
        for state in optimizer.state.values()
        if state["exp_avg"].numel() > 0
    }


def test_states_stay_in_the_tier_of_offload_optimizer(session: Session) -> None:
    _, optimizer = trained()
    handle = offload_optimizer(optimizer, "bind:2")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {tuple(p.granted) for p in handle.placements().values()} == {(2,)}


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_and_pickles_keep_the_placement(
    session: Session, twin: Callable[[Any], Any]
) -> None:
    params, optimizer = trained(policy="bind:2", state_dtype=torch.bfloat16)
    assert granted(optimizer) == {(2,)}
    twins, other = twin((params, optimizer))
    assert granted(other) == {(2,)}
    assert other.state_dtype is torch.bfloat16
    train(optimizer, params, range(2, 4))
    train(other, twins, range(2, 4))
    assert_same(params, twins)
    assert granted(other) == {(2,)}


OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], type[Any]]] = {
    "AdamW into Lion": (torch.optim.AdamW, {}, CPULion),
    "Adamax into Lion": (torch.optim.Adamax, {}, CPULion),
    "Adamax into Adam": (torch.optim.Adamax, {}, CPUAdam),
    "NAdam into Adam": (torch.optim.NAdam, {}, CPUAdam),
    "SGD into Adam": (torch.optim.SGD, {"lr": 0.1}, CPUAdam),
    "SGD with momentum into Adam": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, CPUAdam),
    "SGD into Adagrad": (torch.optim.SGD, {"lr": 0.1}, CPUAdagrad),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_checkpoints_of_other_optimizers_are_refused(case: tuple[Any, dict[str, Any], Any]) -> None:
    theirs, options, kind = case
    params, mine = parameters(), parameters()
    other = theirs(params, **options)
    train(other, params, range(2))
    optimizer = kind(mine, lr=0.1)
    train(optimizer, mine, range(2))
    before = picture(optimizer)
    with pytest.raises(ValueError, match="checkpoint of another optimizer"):
        optimizer.load_state_dict(other.state_dict())
    assert picture(optimizer) == before


FORMS: dict[str, Damage] = {
    "no settings": lambda saved: saved["param_groups"][0].pop("lr"),
    "no parameters": lambda saved: saved["param_groups"][0].pop("params"),
    "states that are none": lambda saved: saved["state"].update({0: None}),
    "states of no parameter": lambda saved: saved["state"].update({99: saved["state"][0]}),
    "a list of states": lambda saved: saved.update(state=[]),
    "groups that are no list": lambda saved: saved.update(param_groups=None),
    "parameters that are no list": lambda saved: saved["param_groups"][0].update(params=None),
    "a state without its memory": lambda saved: (
        saved["state"][0]["exp_avg"].untyped_storage().resize_(0)
    ),
    "a huge step": lambda saved: saved["state"][0].update(step=torch.tensor(1e30)),
    "a huge whole step": lambda saved: saved["state"][0].update(step=10**30),
}


@pytest.mark.parametrize("damage", FORMS.values(), ids=FORMS)
def test_damaged_checkpoints_are_refused_in_one_line(damage: Damage) -> None:
    _, optimizer = trained()
    saved, before = copy.deepcopy(optimizer.state_dict()), picture(optimizer)
    damage(saved)
    with pytest.raises(ValueError, match=r"^load_state_dict: [^\n]*$"):
        optimizer.load_state_dict(saved)
    assert picture(optimizer) == before


def test_what_is_no_checkpoint_is_refused() -> None:
    _, optimizer = trained()
    for given in (None, [], {}, {"state": {}}):
        with pytest.raises(ValueError, match="load_state_dict"):
            optimizer.load_state_dict(given)  # type: ignore[arg-type]
