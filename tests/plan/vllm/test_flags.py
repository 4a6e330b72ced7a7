"""Flags for a plan: what they say, and that the plan's bytes fit what they ask for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Bind, Weighted, parse_policy
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Home, Plan, save_plan
from cxl_offload.plan.vllm.flags import flags_of_plan, offload_flags, policy_of_bytes
from cxl_offload.plan.vllm.layers import layer_bytes
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine

GIB = 1 << 30


def planned(**extra: object) -> Plan:
    return plan_vllm(
        VllmRequest(
            model=load_model("llama-3-70b"),
            machine=load_machine("spr3-h100"),
            prompt=300,
            generated=100,
            model_name="llama-3-70b",
            **extra,  # type: ignore[arg-type]
        )
    )


def test_flags_are_none_when_all_stays_on_the_gpu() -> None:
    assert offload_flags({}, {"0": 0}) == ()


def test_short_shape_leaves_to_vllm_what_it_fills_in() -> None:
    flags = offload_flags({}, {"0": 96 * GIB, "2": 32 * GIB})
    assert flags[:2] == ("--kv-offloading-size", "128")
    assert json.loads(flags[3]) == {
        "kv_connector_extra_config": {"spec_name": "cxl", "policy": "weighted:0=3,2=1"}
    }


def test_long_shape_says_all_in_one_flag() -> None:
    flags = offload_flags({}, {"2": 3 * GIB // 2}, shape="long")
    assert flags[0] == "--kv-transfer-config"
    found = json.loads(flags[1])
    assert (found["kv_connector"], found["kv_role"]) == ("OffloadingConnector", "kv_both")
    extra = found["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 3 * GIB // 2
    assert extra["policy"] == "bind:2"
    assert extra["spec_module_path"].startswith("cxl_offload.integrations.vllm.")


@given(st.dictionaries(st.sampled_from(["0", "1", "2", "3"]), st.integers(1, 10**13), min_size=1))
def test_placement_keeps_the_ratio_of_the_bytes(shares: dict[str, int]) -> None:
    policy = parse_policy(policy_of_bytes(shares))
    if len(shares) == 1:
        assert policy == Bind((int(next(iter(shares))),))
        return
    assert isinstance(policy, Weighted)
    weights, most = policy.weights, max(shares.values())
    for name, count in shares.items():
        share = weights[int(name)] / max(weights.values())
        assert share == pytest.approx(count / most, abs=1 / 255)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "opt-30b", "mixtral-8x7b"])
@pytest.mark.parametrize("layers", [1, 7, 24])
def test_size_has_room_for_the_planned_layers_and_for_no_matrix_more(
    name: str, layers: int
) -> None:
    model = load_model(name)
    offload = layers * layer_bytes(model)
    flags = offload_flags({"0": offload}, {})
    asked = float(flags[flags.index("--cpu-offload-gb") + 1]) * GIB
    pages = 16 * 4096 * layers  # a page too much for each parameter of a layer
    smallest_matrix = 2 * model.hidden * model.hidden
    assert offload + pages <= asked < offload + smallest_matrix


def test_flags_of_a_kept_plan_are_those_of_its_command(tmp_path: Path) -> None:
    limits = {"ldram": 60 * GIB, "rdram": 20 * GIB}
    plan = planned(limits=limits, kv_host_bytes=10 * GIB)
    flags = flags_of_plan(plan)
    assert plan.command[-len(flags) :] == flags
    save_plan(plan, tmp_path / "plan.yaml")
    made = CliRunner().invoke(app, ["vllm-flags", str(tmp_path / "plan.yaml")])
    assert made.exit_code == 0, made.output
    assert tuple(shlex.split(made.output)) == flags
    long = CliRunner().invoke(app, ["vllm-flags", "--long", "--json", str(tmp_path / "plan.yaml")])
    assert "--kv-offloading-size" not in json.loads(long.output)
    assert json.loads(long.output)[:4] == list(flags[:4])


def test_flags_of_a_plan_that_is_advice_come_with_a_warning(tmp_path: Path) -> None:
    plan = replace(planned(limits={"ldram": 60 * GIB}), runs=False, advice="there is no such GPU")
    path = str(tmp_path / "plan.yaml")
    save_plan(plan, path)
    for options in ([], ["--json"]):
        made = CliRunner().invoke(app, ["vllm-flags", *options, path])
        assert made.exit_code == 0, made.output
        assert made.stderr == (
            f"cxl-offload: warning: {path} is advice only: there is no such GPU; its flags are "
            "taken all the same\n"
        )
        flags = json.loads(made.stdout) if options else shlex.split(made.stdout)
        assert tuple(flags) == flags_of_plan(plan)


def test_plan_of_another_executor_has_no_flags() -> None:
    with pytest.raises(ConfigError, match="the plan is for flexgen"):
        flags_of_plan(replace(planned(), executor="flexgen"))


def test_home_without_a_single_node_is_refused() -> None:
    home = Home(kind="kv evicted", where="cxl", bytes=1, percent=100, policy="interleave:0,2")
    with pytest.raises(ConfigError, match="expected one node"):
        flags_of_plan(replace(planned(), homes=(home,)))
