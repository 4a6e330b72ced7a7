"""Weights with a copy near each socket: written and read as one, and refused where they cannot."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import GenerateRun, generation, load, offload
from cxl_offload.memory import Session
from cxl_offload.ops.linear import PreparedLinear
from cxl_offload.tensor import copies_of, placement_of

from .commands import command, run
from .fake_accelerator import fake_accelerator
from .models import generate, make

COPIES = {"weights": "replicate:0,1"}
CALL = PreparedLinear.__call__


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Calls of the kernel for linear layers."""
    counted = Mock()

    def call(layer: PreparedLinear, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        counted()
        return CALL(layer, x, *rest)

    monkeypatch.setattr(PreparedLinear, "__call__", call)
    return counted


def check_copies(model: PreTrainedModel, session: Session) -> None:
    for name, weight in model.named_parameters():
        first, second = copies_of(weight.data)
        assert torch.equal(first, second), name
        nbytes = weight.nbytes
        assert session.bytes_per_node(first.data_ptr(), nbytes) == {0: nbytes}
        assert session.bytes_per_node(second.data_ptr(), nbytes) == {1: nbytes}
        assert placement_of(weight.data, session=session).granted == {0: nbytes, 1: nbytes}


def test_offloaded_weights_are_on_both_nodes_and_give_the_same_tokens(
    session: Session, called: Mock
) -> None:
    model = make("llama")
    stock = generate(model, "sdpa")
    total = sum(weight.nbytes for weight in model.parameters())
    with offload(model, {**COPIES, "kv": "bind:2"}, session=session) as done:
        check_copies(model, session)
        tokens = generate(model)
        uses = [use for (kind, _), use in done.store.use().items() if kind != "kv"]
        assert sum(use.live_bytes for use in uses) == total
        assert sum(sum(use.granted.values()) for use in uses) == 2 * total
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert called.call_count >= 9 * len(layers)  # without linear_rows: torch would read one copy
    assert torch.equal(tokens, stock)
    assert all(len(copies_of(weight.data)) == 1 for weight in model.parameters())


def test_a_weight_that_is_cut_or_turned_in_the_block_is_computed_as_it_is(session: Session) -> None:
    model = make("llama")
    head, layer = model.lm_head, model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, head.in_features)
    with offload(model, COPIES, session=session), torch.no_grad():
        for each in (head, layer):
            each(x)
        head.weight = torch.nn.Parameter(head.weight[:5])
        layer.weight.data = layer.weight.data.t()
        for each in (head, layer):
            torch.testing.assert_close(each(x), torch.nn.functional.linear(x, each.weight))


def test_a_deep_copy_and_the_original_compute_their_own_weights(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread computes the copy between what is asked and what is computed."""
    model = make("llama")
    x = torch.randn(2, model.lm_head.in_features)
    is_of, others = PreparedLinear.is_of, list[torch.nn.Module]()

    def slowly(prepared: PreparedLinear, *given: Any) -> bool:
        answer = is_of(prepared, *given)
        if others:
            others.pop()(x)
        return answer

    with offload(model, COPIES, session=session), torch.no_grad():
        expected, copy = model.lm_head(x), deepcopy(model.lm_head)
        copy.weight.zero_()
        monkeypatch.setattr(PreparedLinear, "is_of", slowly)
        others.append(copy)
        assert torch.equal(model.lm_head(x), expected)


def test_loading_straight_into_place_writes_both_copies(folder: Path, session: Session) -> None:
    model = load(folder, COPIES, session=session)
    check_copies(model, session)
    stock = make("llama").state_dict()
    assert all(torch.equal(each, stock[name]) for name, each in model.state_dict().items())


def test_generate_places_copies_and_says_so(folder: Path, tmp_path: Path, called: Mock) -> None:
    file = tmp_path / "report.json"
    places = ("--place", "mlp=replicate:ldram,rdram", "--place", "kv=cxl")
    assert run(command(folder, *places, "--gen-len", "4", "--output", str(file))) == 0
    rows = {row["kind"]: row for row in json.loads(file.read_text())["placement"]}
    nbytes = rows["mlp"]["requested_bytes"]
    assert rows["mlp"]["granted_bytes_per_tier"] == {"ldram": nbytes, "rdram": nbytes}
    assert called.call_count > 0


def test_room_is_counted_on_every_node_before_loading(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--place", "weights=replicate:ldram,rdram", "--limit", "rdram=64KiB")
    assert run(command(folder, *places)) > 0
    assert "tier rdram" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policies", "options", "why"),
    [
        ({"kv": "replicate:0,1"}, {}, "policy of kv: replicate:0,1: kv cannot have copies"),
        (
            {"activations": "replicate:0,1", "kv": "cxl"},
            {"rows_at_once": 1},
            "policy of activations: replicate:0,1: activations cannot have copies",
        ),
        (
            {"experts": "replicate:0,1", "experts:0": "cxl"},
            {},
            "policy of experts: replicate:0,1 is for all experts alike; leave experts:0 out",
        ),
        (
            {"experts": "cxl", "experts:0": "replicate:0,1"},
            {},
            "policy of experts:0: replicate:0,1 is for all experts alike",
        ),
        (COPIES, {"linear_rows": 0}, "replicate:0,1 and linear_rows 0: torch reads the first copy"),
        (
            COPIES,
            {"near_expert_bytes": 1 << 20},
            "replicate:0,1: copies do not move; leave tune and",
        ),
        ({"weights": "replicate:0"}, {}, "policy of weights: replicate:0: copies are on two nodes"),
    ],
)
def test_what_cannot_have_copies_is_refused_in_one_line(
    policies: dict[str, str], options: dict[str, Any], why: str, session: Session
) -> None:
    with pytest.raises(ConfigError) as refused:
        offload(make("llama"), policies, session=session, **options)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_accelerator_refuses_copies(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_accelerator(monkeypatch, Mock())
    with pytest.raises(ConfigError, match="replicate:0,1: an accelerator reads one copy only"):
        offload(make("llama"), COPIES, session=session, accelerator="cuda")
    assert session.stats().mapped_bytes.total == 0


def test_generate_on_an_accelerator_refuses_copies_before_it_loads(
    folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_accelerator(monkeypatch, Mock())
    monkeypatch.setattr(generation, "chosen_device", lambda *_: torch.device("cpu"))
    request = GenerateRun(
        model=str(folder), prompts=("40 41",), place={"mlp": "replicate:0,1"}, accelerator="cuda"
    )
    with pytest.raises(ConfigError, match="policy of mlp: replicate:0,1: an accelerator reads one"):
        generation.run(request, session=session)
    assert session.stats().mapped_bytes.total == 0
