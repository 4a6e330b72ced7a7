"""What does not fit is refused, and nothing has been written when it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam, adam_step
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.state_options import StateOptions

from .tensors import BF16, F16, bits, draw

NUMEL = 100
Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    drawn = draw(NUMEL)
    return {
        "param": drawn.param,
        "grad": drawn.grad,
        "exp_avg": drawn.exp_avg,
        "exp_avg_sq": drawn.exp_avg_sq,
        "low_precision_copy": torch.zeros(NUMEL, dtype=BF16),
    }


NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "low_precision_copy")
WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": lambda t: torch.zeros(2 * NUMEL, dtype=t.dtype)[::2],
    "reversed-layout": lambda t: torch.zeros(20, 5, dtype=t.dtype).t(),
    "expanded": lambda t: torch.zeros(1, dtype=t.dtype).expand(NUMEL),
    "fp64": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "short": lambda t: t[:-1],
    "long": lambda t: torch.zeros(NUMEL + 1, dtype=t.dtype),
    "empty": lambda t: t[:0],
    "other-shape": lambda t: t.view(10, 10),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", WRONG)
def test_step_refuses_tensor_before_writing(name: str, wrong: str) -> None:
    given = tensors()
    given[name] = WRONG[wrong](given[name])
    dense = {key: t for key, t in given.items() if t.layout is torch.strided and not t.is_meta}
    before = {key: bits(t) for key, t in dense.items()}
    with pytest.raises(ValueError, match=r"param|grad|exp_avg|low_precision_copy"):
        adam_step(**given, step=1, lr=0.1)
    assert {key: bits(given[key]) for key in before} == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("exp_avg", BF16),
        ("exp_avg_sq", BF16),
        ("exp_avg", F16),
        ("low_precision_copy", torch.float32),
        ("param", BF16),  # beside a copy
    ],
)
def test_step_refuses_types_that_do_not_go_together(name: str, dtype: torch.dtype) -> None:
    given = tensors()
    given[name] = given[name].to(dtype)
    before = {key: bits(t) for key, t in given.items()}
    with pytest.raises(ValueError, match="bfloat16"):
        adam_step(**given, step=1, lr=0.1)
    assert {key: bits(t) for key, t in given.items()} == before


@pytest.mark.parametrize(
    ("first", "second"),
    [("param", "grad"), ("param", "exp_avg"), ("exp_avg", "exp_avg_sq"), ("grad", "exp_avg_sq")],
)
@pytest.mark.parametrize("shift", [0, 1, NUMEL - 1])
def test_step_refuses_memory_that_overlaps(first: str, second: str, shift: int) -> None:
    base = torch.ones(2 * NUMEL)
    given = tensors()
    given[first] = base[:NUMEL]
    given[second] = base[shift : shift + NUMEL]
    before = {key: bits(t) for key, t in given.items()}
    with pytest.raises(ValueError, match="overlaps"):
        adam_step(**given, step=1, lr=0.1)
    assert {key: bits(t) for key, t in given.items()} == before


def test_step_takes_neighbours_that_only_touch() -> None:
    base = torch.ones(4 * NUMEL)
    parts = base.split(NUMEL)
    adam_step(*parts, step=1, lr=0.5)
    apart = [torch.ones(NUMEL) for _ in range(4)]
    adam_step(*apart, step=1, lr=0.5)
    assert [bits(part) for part in parts] == [bits(tensor) for tensor in apart]
    assert not torch.equal(apart[0], torch.ones(NUMEL))


@pytest.mark.parametrize(
    "setting",
    [
        {"step": 0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": float("inf")},
        {"grad_scale": float("nan")},
        {"threads": 0},
        {"threads": {}},
        {"threads": {12345: 1}},
        {"isa": "mmx"},
    ],
    ids=str,
)
def test_step_refuses_setting_before_writing(setting: dict[str, object]) -> None:
    given = tensors()
    before = {key: bits(t) for key, t in given.items()}
    with pytest.raises(ValueError, match=r"must be|at least|has no node|not known"):
        adam_step(**given, **{"step": 1, "lr": 0.1, **setting})  # type: ignore[arg-type]
    assert {key: bits(t) for key, t in given.items()} == before


def test_step_refuses_what_is_no_tensor() -> None:
    given = tensors()
    with pytest.raises(TypeError, match="grad is a ndarray"):
        adam_step(**{**given, "grad": given["grad"].numpy()}, step=1, lr=0.1)  # type: ignore[arg-type]


def test_optimizer_writes_nothing_when_one_of_its_parameters_is_wrong() -> None:
    good = torch.nn.Parameter(torch.ones(40_000))
    bad = torch.nn.Parameter(torch.ones(20, 5).t())
    optimizer = CPUAdam([good, bad], lr=0.1)
    good.grad, bad.grad = torch.ones_like(good), torch.ones_like(bad)
    with pytest.raises(ValueError, match="not contiguous"):
        optimizer.step()
    assert (good == 1).all()
    assert int(optimizer.state[good]["step"]) == 0
    assert (optimizer.state[good]["exp_avg"] == 0).all()


def test_optimizer_refuses_one_storage_in_two_parameters() -> None:
    base = torch.ones(100)
    params = [torch.nn.Parameter(base[:60]), torch.nn.Parameter(base[40:])]
    optimizer = CPUAdam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="overlaps"):
        optimizer.step()
    assert (base == 1).all()


@pytest.mark.parametrize(
    "option", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"state_dtype": F16}, {"weight_decay": -1.0}]
)
def test_optimizer_refuses_setting_when_it_is_made(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|state_dtype"):
        CPUAdam([torch.nn.Parameter(torch.ones(3))], **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_optimizer_refuses_variant_that_it_lacks(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CPUAdam([{"params": [torch.nn.Parameter(torch.ones(3))], name: True}])


@pytest.mark.parametrize("make", [CPUAdam, CPULion, CPUAdagrad])
def test_keywords_of_torch_are_taken_where_they_change_nothing(make: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    made = make(params, foreach=None, fused=True, capturable=False, amsgrad=False)
    assert not made.defaults.keys() & {"foreach", "fused", "capturable", "amsgrad"}
    with pytest.raises(ValueError, match=f"^{make.__name__} has no amsgrad; turn it off$"):
        make(params, amsgrad=True)
    with pytest.raises(TypeError, match=f"^{make.__name__} has no keyword momentun$"):
        make(params, momentun=0.9)


OF_ALL_GROUPS: dict[str, object] = {
    "late_max_norm": 1e-12,
    "overlap": True,
    "pages": "thp",
    "placement": "bind:0",
    "policy": "bind:0",
    "rounding_seed": 1,
    "state_dtype": torch.float32,
    "threads": None,
}


@pytest.mark.parametrize("make", [CPUAdam, CPULion, CPUAdagrad])
@pytest.mark.parametrize("name", OF_ALL_GROUPS)
def test_option_of_all_groups_is_refused_in_one_of_them(name: str, make: Any) -> None:
    value, param = OF_ALL_GROUPS[name], torch.nn.Parameter(torch.ones(3))
    class_name = make.__name__
    said = rf"^{class_name}: {name} in a group does nothing[^\n]*{class_name}\(\.\.\.[^\n]*$"
    with pytest.raises(ValueError, match=said):
        make([{"params": [param], name: value}])
    optimizer = make([param])
    with pytest.raises(ValueError, match=said):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], name: value})
    saved = optimizer.state_dict()
    saved["param_groups"][0][name] = value
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(saved)
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=said):
        optimizer.step()


@pytest.mark.parametrize("make", [CPUAdam, CPULion, CPUAdagrad])
def test_every_option_is_read_in_a_group_or_refused_there(make: Any) -> None:
    """None is kept and ignored."""
    optimizer = make([torch.nn.Parameter(torch.ones(3))])
    options = {*inspect.signature(make).parameters, *StateOptions.__annotations__}
    for name in options - {"params", "states"} - set(optimizer.defaults):
        with pytest.raises(ValueError, match=f"{name} in a group does nothing"):
            make([{"params": [torch.nn.Parameter(torch.ones(3))], name: None}])


def test_settings_and_own_names_of_a_group_stay() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    own = {"name": "head", "initial_lr": 0.5, "lr": 0.1, "decoupled_weight_decay": False}
    optimizer = CPUAdam([{"params": [param], **own}])
    param.grad = torch.ones(3)
    optimizer.step()
    assert own.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize("policy", ["bnd:0", "rdram", "bind:900"])
def test_policy_that_the_session_does_not_know_is_refused_when_it_is_given(policy: str) -> None:
    with pytest.raises(ValueError, match=r"bnd:0|rdram|900"):
        CPUAdam([torch.nn.Parameter(torch.ones(3))], policy=policy)
    with pytest.raises(ValueError, match=r"bnd:0|rdram|900"):
        cxl_offload.offload_activations(policy)
