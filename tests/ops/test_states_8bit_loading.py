"""Checkpoints of states in 8 bits: there and back, from others, and refused as a whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.state_codes import float_state_dict

from ..integrations.transformers.ecosystem import needed
from ..memory.machines import simulated_memory
from .tensors import bits
from .test_optimizer_loading import picture
from .test_optimizers import assert_same, parameters, through_file, train

BYTES: dict[str, Any] = {"lr": 0.1, "state_dtype": torch.uint8, "rounding_seed": 3}


def trained(kind: Any = CPUAdam, **options: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = parameters()
    optimizer = kind(params, **{**BYTES, **options})
    train(optimizer, params, range(2))
    return params, optimizer


@pytest.mark.parametrize("kind", [CPUAdam, CPULion])
def test_resumed_training_has_the_same_bits(kind: Any) -> None:
    straight, optimizer = trained(kind)
    train(optimizer, straight, range(2, 5))
    params, first = trained(kind)
    second = kind(params, **BYTES)
    second.load_state_dict(through_file(first.state_dict()))
    train(second, params, range(2, 5))
    assert_same(params, straight)


def test_checkpoint_becomes_one_of_torch_and_comes_back_as_it_was() -> None:
    params, optimizer = trained()
    saved = float_state_dict(optimizer.state_dict())
    theirs = torch.optim.AdamW(parameters(), lr=0.1)
    theirs.load_state_dict(copy.deepcopy(saved))
    train(theirs, theirs.param_groups[0]["params"], range(1))
    again = CPUAdam(parameters(), **BYTES)
    again.load_state_dict(saved)
    back = float_state_dict(again.state_dict())["state"]
    for key, values in saved["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            limit = float(values[name].abs().max()) / 2**15 if values[name].numel() else 0.0
            torch.testing.assert_close(back[key][name], values[name], rtol=0.07, atol=limit)
    assert len(params) == len(back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_other_widths_are_converted_both_ways(dtype: torch.dtype) -> None:
    params, source = trained(state_dtype=dtype)
    narrow = CPUAdam(params, **BYTES)
    narrow.load_state_dict(source.state_dict())
    wide = CPUAdam(params, lr=0.1, state_dtype=dtype)
    wide.load_state_dict(narrow.state_dict())
    for param in params:
        assert int(wide.state[param]["step"]) == 2
        for name in ("exp_avg", "exp_avg_sq"):
            one, other = source.state[param][name].float(), wide.state[param][name].float()
            assert wide.state[param][name].dtype is dtype
            limit = float(one.abs().max()) * 2.0**-15 if one.numel() else 0.0
            torch.testing.assert_close(other, one, rtol=0.07, atol=limit)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_keep_bits_and_placement(twin: Callable[[Any], Any]) -> None:
    with cxl_offload.use(simulated_memory()):
        params, optimizer = trained(policy="bind:2")
        twins, other = twin((params, optimizer))
        for both in zip(params, twins, strict=True):
            one, two = optimizer.state[both[0]], other.state[both[1]]
            assert [bits(one[name]) for name in optimizer.kept_names] == [
                bits(two[name]) for name in other.kept_names
            ]
        placed = other.state[twins[4]]["exp_avg_codes"]
        assert tuple(cxl_offload.placement_of(placed).granted) == (2,)
        train(optimizer, params, range(2, 4))
        train(other, twins, range(2, 4))
        assert_same(params, twins)


Damage = Callable[[dict[str, Any]], Any]


def _set(name: str, value: Any) -> Damage:
    return lambda saved: saved["state"][4].__setitem__(name, value)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "other blocks": (_set("exp_avg_scales", torch.zeros(9, dtype=torch.uint8)), "blocks of 128"),
    "other shape": (_set("exp_avg_codes", torch.zeros(2112, dtype=torch.uint8)), "blocks of 128"),
    "other type": (_set("exp_avg_sq_codes", torch.zeros(64, 33)), "torch.float32 of shape"),
    "no tensor": (_set("exp_avg_sq_scales", [0]), "is list"),
    "no scales": (lambda s: s["state"][4].pop("exp_avg_scales"), "no exp_avg_scales"),
    "half of each": (_set("exp_avg", torch.zeros(64, 33)), "does not keep"),
    "a step of many": (_set("step", torch.zeros(2)), "one number"),
}


@pytest.mark.parametrize("state_dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_codes_are_refused_in_one_line(damage: str, state_dtype: torch.dtype) -> None:
    saved = copy.deepcopy(trained()[1].state_dict())
    spoil, message = DAMAGES[damage]
    spoil(saved)
    _, optimizer = trained(state_dtype=state_dtype)
    before = picture(optimizer)
    with pytest.raises(ValueError, match=rf"^load_state_dict: [^\n]*{message}[^\n]*$"):
        optimizer.load_state_dict(saved)
    assert picture(optimizer) == before


def test_codes_of_other_optimizers_are_refused() -> None:
    _, adam = trained()
    _, lion = trained(CPULion)
    saved = copy.deepcopy(adam.state_dict())
    with pytest.raises(ValueError, match="checkpoint of another optimizer"):
        lion.load_state_dict(saved)
    with pytest.raises(ValueError, match="checkpoint of another optimizer"):
        adam.load_state_dict(copy.deepcopy(lion.state_dict()))
    saved["param_groups"][0]["lr_decay"] = 0.0
    with pytest.raises(ValueError, match="checkpoint of another optimizer"):
        CPUAdagrad(parameters()).load_state_dict(saved)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="CPUAdagrad: state_dtype"):
        CPUAdagrad(parameters(), state_dtype=torch.uint8)
    with pytest.raises(ValueError, match="CPUAdagrad has no rounding_seed"):
        CPUAdagrad(parameters(), rounding_seed=1)
    for seed in (-1, 2**64, 1.5, True):
        with pytest.raises(ValueError, match="rounding_seed is"):
            CPUAdam(parameters(), rounding_seed=seed)  # type: ignore[arg-type]
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match=r"float16 are never rounded at random.* make them bf"):
        CPUAdam([half], state_dtype=torch.uint8).step()
    assert (half == 1).all()


def test_states_of_bitsandbytes_are_loaded() -> None:
    """Its form, made by hand: a table of 256 numbers, indices, a factor for 256 elements."""
    params = [torch.nn.Parameter(torch.ones(300)), torch.nn.Parameter(torch.ones(7))]
    table = torch.linspace(-1, 1, 256)
    index = torch.arange(300).remainder(256).to(torch.uint8)
    factors = torch.tensor([0.5, 0.25])
    nested = {
        "state1": index, "qmap1": table, "absmax1": factors,
        "state2": index, "qmap2": table.abs(), "absmax2": factors,
    }  # fmt: skip
    small = {"state1": torch.full((7,), 0.1), "state2": torch.full((7,), 0.2)}
    saved = CPUAdam(params).state_dict()
    saved["state"] = {
        key: {"step": 5, "__bnb_optimizer_quant_state__": form}
        for key, form in enumerate((nested, small))
    }
    optimizer = CPUAdam(params)
    optimizer.load_state_dict(saved)
    means = table[index.long()] * torch.where(torch.arange(300) < 256, 0.5, 0.25)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], means)
    assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], means.abs())
    assert (optimizer.state[params[1]]["exp_avg_sq"] == 0.2).all()
    assert int(optimizer.state[params[0]]["step"]) == 5
    nested["absmax1"] = torch.ones(3)
    with pytest.raises(ValueError, match="block size must be 256"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("peer", ["torchao.optim", "bitsandbytes.optim"])
def test_checkpoints_of_peers_are_loaded(peer: str) -> None:
    theirs_of = needed(peer).AdamW8bit
    theirs_params, plain = (
        [torch.nn.Parameter(torch.ones(64, 128))],
        CPUAdam([torch.nn.Parameter(torch.ones(64, 128))], lr=1e-3),
    )
    theirs = theirs_of(theirs_params, lr=1e-3)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for half a minute
        train(theirs, theirs_params, range(1))
    train(plain, plain.param_groups[0]["params"], range(1))
    optimizer = CPUAdam([torch.nn.Parameter(torch.ones(64, 128))], **BYTES)
    optimizer.load_state_dict(theirs.state_dict())
    found = float_state_dict(optimizer.state_dict())["state"][0]
    wanted = plain.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        off = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert off < 0.06


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("exp_avg_scales", lambda t: t[:1], "700 codes and scales .1,.; there must be 6"),
        ("exp_avg_scales", lambda t: torch.cat((t, t)), "there must be 6"),
        ("exp_avg_codes", lambda t: t.float(), "torch.float32 and torch.uint8; both must be uint8"),
        ("exp_avg_codes", lambda _: None, "NoneType and torch.uint8; both must be uint8"),
        ("exp_avg_codes", None, "has no exp_avg_codes"),
        ("exp_avg_sq_scales", None, "has no exp_avg_sq_scales"),
    ],
)
def test_damaged_codes_become_no_floats(name: str, changed: Any, said: str) -> None:
    param = torch.nn.Parameter(torch.ones(700))
    optimizer = CPUAdam([param], state_dtype=torch.uint8)
    param.grad = torch.ones(700)
    optimizer.step()
    saved = optimizer.state_dict()
    states = dict(saved["state"][0])
    whole = states.pop(name)
    if changed is not None:
        states[name] = changed(whole)
    with pytest.raises(ValueError, match=said):
        float_state_dict({**saved, "state": {0: states}})
