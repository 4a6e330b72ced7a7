"""Settings of optimizers that no float32 holds, or that are none, are refused by their names."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest
import torch

from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam, adam_step
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.optimizer import OnePassOptimizer

from .tensors import bits

CLASSES: list[type[OnePassOptimizer]] = [CPUAdam, CPULion, CPUAdagrad]
SETTINGS = {
    CPUAdam: ["lr", "eps", "weight_decay"],
    CPULion: ["lr", "weight_decay"],
    CPUAdagrad: ["lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"],
}
OWN = [(kind, name) for kind, names in SETTINGS.items() for name in names]
IDS = [f"{kind.__name__}-{name}" for kind, name in OWN]


def parameter() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.ones(100))
    param.grad = torch.full((100,), 0.5)
    return param


def said(told: pytest.ExceptionInfo[Exception]) -> str:
    text = str(told.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("kind", "name"), OWN, ids=IDS)
@pytest.mark.parametrize("value", [1e300, 3.5e38])
def test_number_beyond_float32_is_refused_when_an_optimizer_is_made(
    kind: type[Any], name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"^update: {name} is .* float32, which holds up to"):
        kind([parameter()], **{name: value})


@pytest.mark.parametrize(("kind", "name"), OWN, ids=IDS)
@pytest.mark.parametrize("value", [10**400, float("inf")], ids=["whole", "inf"])
def test_number_beyond_any_is_not_finite(kind: type[Any], name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} .*must be finite") as told:
        kind([parameter()], **{name: value})
    assert len(said(told)) < 600


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lr": 3e38}, "lr / (1 - beta1 ** step) is 3e+39"),
        ({"lr": 1e20, "weight_decay": 1e20}, "lr * weight_decay is 1e+40"),
    ],
)
def test_product_beyond_float32_is_refused(settings: dict[str, float], what: str) -> None:
    with pytest.raises(ValueError, match="float32") as told:
        CPUAdam([parameter()], **settings)
    assert what in said(told)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e38, "bias_correction": False},
        {"lr": 3e37},
        {"lr": 1e-50},  # a schedule may end there
        {"lr": torch.tensor(0.01)},
        {"eps": 0.0},
        {"eps": 1e-38},
        {"weight_decay": 1e-300},
    ],
    ids=str,
)
def test_what_float32_holds_or_rounds_is_taken(settings: dict[str, Any]) -> None:
    param = parameter()
    CPUAdam([param], **settings).step()
    assert torch.isfinite(param).all()


def test_group_that_was_changed_is_refused_before_anything_is_written() -> None:
    param = parameter()
    optimizer = CPUAdam([param])
    before = bits(param.data)
    optimizer.param_groups[0]["lr"] = 1e300
    with pytest.raises(ValueError, match="lr is 1e"):
        optimizer.step()
    assert bits(param.data) == before


@pytest.mark.parametrize("scale", [1e300, -1e39])
def test_scale_of_gradients_is_held_to_it_too(scale: float) -> None:
    param = parameter()
    with pytest.raises(ValueError, match=r"^update: grad_scale is"):
        CPUAdam([param]).step(grad_scale=scale)
    assert (param == 1).all()


@pytest.mark.parametrize("scale", ["2", None, [1.0]], ids=repr)
def test_scale_that_is_no_number_is_named(scale: Any) -> None:
    param = parameter()
    optimizer = CPUAdam([param])
    for _ in range(2):  # the first one makes the states
        with pytest.raises(TypeError, match=r"^update: grad_scale is .*; it must be a number$"):
            optimizer.step(grad_scale=scale)
        assert (param == 1).all()
        optimizer.init_state(param, optimizer.param_groups[0])


def test_one_step_of_a_function_is_held_to_it_too() -> None:
    tensors = [torch.ones(8) for _ in range(4)]
    with pytest.raises(ValueError, match=r"^update: lr is 1e"):
        adam_step(*tensors, step=1, lr=1e300)
    with pytest.raises(TypeError, match=r"^update: betas is"):
        adam_step(*tensors, step=1, lr=0.1, betas=(0.9,))  # type: ignore[arg-type]
    assert all((each == 1).all() for each in tensors)


@pytest.mark.parametrize("step", [1.5, None, float("nan"), 2**63, -(2**70), "1"], ids=repr)
def test_step_that_is_no_whole_number_is_named(step: Any) -> None:
    tensors = [torch.ones(8) for _ in range(4)]
    with pytest.raises(TypeError, match=r"^update: step is .*; it must be a whole number of steps"):
        adam_step(*tensors, step=step, lr=0.1)
    with pytest.raises(ValueError, match="step is 0; it must be at least 1"):
        adam_step(*tensors, step=0, lr=0.1)


@pytest.mark.parametrize("kind", [CPUAdam, CPUAdagrad])
def test_divisor_that_float32_rounds_to_nothing_is_refused(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"^update: eps is 1e-300; float32 rounds it to 0"):
        kind([parameter()], eps=1e-300)


@pytest.mark.parametrize("kind", [CPUAdam, CPULion])
@pytest.mark.parametrize(
    "betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, None, "no", repeat(0.9)], ids=str
)
def test_betas_that_are_not_two_numbers_are_named(kind: type[Any], betas: object) -> None:
    with pytest.raises(TypeError, match=r"^update: beta.* is .*; it must be"):
        kind([parameter()], betas=betas)


@pytest.mark.parametrize(("kind", "name"), OWN, ids=IDS)
@pytest.mark.parametrize("value", ["b", None, torch.ones(3), [1]], ids=["text", "none", "t", "l"])
def test_what_is_no_number_is_named(kind: type[Any], name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^update: {name} is .*; it must be a number$") as told:
        kind([parameter()], **{name: value})
    said(told)


@pytest.mark.parametrize("kind", CLASSES)
def test_setting_that_was_taken_out_of_a_group_is_named(kind: type[Any]) -> None:
    param = parameter()
    optimizer = kind([param])
    group = optimizer.param_groups[0]
    unread = {"maximize", "initial_accumulator_value"}
    for name in set(optimizer.defaults) - unread:
        kept = group.pop(name)
        with pytest.raises(ValueError, match=f"^update: {name} is missing"):
            optimizer.step()
        group[name] = kept
    assert (param == 1).all()
    optimizer.step()


def test_number_that_takes_itself_out_of_the_group_is_still_named() -> None:
    optimizer = CPUAdam([parameter()])
    group = optimizer.param_groups[0]

    class Leaving:
        def __float__(self) -> float:
            del group["lr"]
            raise TypeError

        def __repr__(self) -> str:
            return "Leaving()"

    group["lr"] = Leaving()
    with pytest.raises(TypeError, match=r"^update: lr is Leaving\(\); it must be a number$"):
        optimizer.step()


@pytest.mark.parametrize("threads", ["a", 1.5, {0: "a"}, {"a": 1}, {0: 1, "a": 1}, [1]], ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_threads_that_are_no_numbers_are_named(kind: type[Any], threads: object) -> None:
    with pytest.raises(TypeError, match=r"^threads is .*; it must be a number of threads"):
        kind([parameter()], threads=threads)
    with pytest.raises(TypeError, match=r"^threads is .*; it must be a number of threads"):
        adam_step(*(torch.ones(8) for _ in range(4)), step=1, lr=0.1, threads=threads)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("value", ["x", "", None, 2, [True]], ids=repr)
def test_switch_that_is_none_is_refused_by_its_name(kind: type[Any], value: Any) -> None:
    names = ["maximize", "overlap"]
    names += ["adamw", "bias_correction"] if kind is CPUAdam else []
    for name in names:
        with pytest.raises(TypeError, match="must be true or false") as told:
            kind([parameter()], **{name: value})
        assert {"adamw": "decoupled_weight_decay"}.get(name, name) in said(told)
    optimizer = kind([parameter()])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["maximize"] = value
    with pytest.raises(TypeError, match="maximize"):
        optimizer.load_state_dict(saved)
    kind([parameter()], maximize=1, overlap=0)


@pytest.mark.parametrize(("kind", "name"), OWN, ids=IDS)
def test_text_of_a_number_is_no_number(kind: type[Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is '1e-3'; it must be a number"):
        kind([parameter()], **{name: "1e-3"})
