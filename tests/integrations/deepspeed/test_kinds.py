"""What a user may ask for, without DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxl_offload import load_machine
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.deepspeed.kinds import (
    COPIED,
    KINDS,
    STREAMED,
    kind_policies,
    parse_request,
)
from cxl_offload.memory import Bind, Preferred, Weighted
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import save_plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training

MACHINE = load_machine("epyc9354-cxl-a")


def test_defaults_keep_states_off_cxl_and_copies_at_the_gpu() -> None:
    found = kind_policies(None, MACHINE, gpu_node=1).by_kind
    assert set(found) == set(KINDS)
    assert {found[kind] for kind in STREAMED} == {Preferred((MACHINE.initiator,))}
    assert {found[kind] for kind in COPIED} == {Preferred((1,))}


def test_kinds_that_are_not_named_keep_their_default() -> None:
    found = kind_policies({"exp_avg": "cxl", "params": {0: 3, 2: 1}}, MACHINE).by_kind
    assert found["exp_avg"] == Bind((2,))
    assert found["params"] == Weighted({0: 3, 2: 1})
    assert found["exp_avg_sq"] == Preferred((0,))


@pytest.mark.parametrize("one", ["cxl", Bind((2,)), {2: 1}], ids=str)
def test_one_policy_is_for_every_kind(one: object) -> None:
    assert set(kind_policies(one, MACHINE).by_kind.values()) == {Bind((2,))}  # type: ignore[arg-type]


def test_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="no kind momentum in ZeRO-Offload; kinds: fp32_master"):
        kind_policies({"momentum": "cxl"}, MACHINE)


def test_copies_are_refused_by_the_name_of_the_kind() -> None:
    with pytest.raises(ValueError, match="exp_avg of DeepSpeed cannot have copies"):
        kind_policies({"exp_avg": "replicate:0,1"}, MACHINE)


def test_unknown_tier_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(ValueError, match="'hbm' is neither a node id nor a tier"):
        kind_policies({"exp_avg": "hbm"}, MACHINE)


def test_plan_of_training_places_its_kinds_and_those_like_them(tmp_path: Path) -> None:
    machine, model = MACHINE, load_model("opt-1.3b")
    plan = plan_training(
        TrainingRequest(
            model=model,
            machine=machine,
            batch=8,
            tokens=512,
            tiers=["ldram", "cxl"],
            limits={"ldram": 16 << 30},
            replay=None,
        )
    )
    assert len({home.where for home in plan.homes}) > 1  # otherwise this would show nothing
    save_plan(plan, tmp_path / "plan.yaml")
    found = kind_policies(tmp_path / "plan.yaml", machine)
    assert found.source == "plan of opt-1.3b on " + plan.machine
    for home in plan.homes:
        used = {machine.tier_of(node) for node in _nodes(found.by_kind[home.kind])}
        assert home.where.split()[0] in {tier.name for tier in used if tier}
    assert found.by_kind["temp_grad"] == found.by_kind["staging"]


def _nodes(policy: object) -> tuple[int, ...]:
    nodes = getattr(policy, "nodes", ())
    assert nodes
    return tuple(nodes)


def test_text_of_the_environment_is_kinds_one_policy_or_a_file(tmp_path: Path) -> None:
    both = parse_request("exp_avg=weighted:ldram=3,cxl=1; staging=ldram")
    assert both == {"exp_avg": "weighted:ldram=3,cxl=1", "staging": "ldram"}
    assert parse_request("weighted:0=4,2=1") == "weighted:0=4,2=1"
    assert parse_request("missing/plan.yaml") == Path("missing/plan.yaml")
    assert parse_request("  ") is None
    for wrong in ("exp_avg=", "exp_avg=cxl;exp_avg=ldram", "no/such/file", "cxl;ldram"):
        with pytest.raises(ConfigError):
            parse_request(wrong)


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_of_a_caller_is_no_way_to_say_the_defaults(text: str) -> None:
    """Of the environment it is: `cxl-offload run` without a plan leaves it so."""
    with pytest.raises(ConfigError, match="is no plan and no policy; leave it out"):
        kind_policies(text, MACHINE)
    assert kind_policies(None, MACHINE).source == "defaults"
