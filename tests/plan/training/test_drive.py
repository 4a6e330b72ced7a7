"""Training with a drive: what is put there, what that takes, and when it is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, parse_plan, plan_text
from cxl_offload.plan.training.drive import GROUP_ELEMENTS, buffer_elements
from cxl_offload.plan.training.plan import DRIVE_TERM, TrainingRequest, plan_training
from cxl_offload.topology import load_machine

GIB = 1 << 30
LARGEST = max(t.elements // t.count for t in load_model("opt-6.7b").tensors())
TIGHT = {"tiers": ("ldram", "nvme"), "limits": {"ldram": 40 * GIB}}


def planned(model: str = "opt-6.7b", **extra: Any) -> Plan:
    given: dict[str, Any] = {
        "machine": load_machine("epyc9354-cxl-a"), "batch": 16, "tokens": 1024,
        "nvme_path": "/scratch", **extra,
    }  # fmt: skip
    return plan_training(TrainingRequest(model=load_model(model), **given))


def test_states_that_memory_does_not_hold_are_on_the_drive() -> None:
    plan = planned(**TIGHT)
    params = load_model("opt-6.7b").parameters
    for kind in ("fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq"):
        assert plan.of(kind) == {"nvme": 4 * params}
    assert plan.drive_bytes == 16 * params
    assert plan.of("swap_buffers") == {"ldram": 16 * buffer_elements(LARGEST)}
    assert plan.of("params") == {"ldram": 2 * params}  # these fit
    assert plan.node_bytes[0] <= 40 * GIB
    assert parse_plan(plan_text(plan), file="p") == plan


def test_deepspeed_is_told_where_the_drive_is() -> None:
    zero = json.loads(planned(**TIGHT).settings["ds_config.json"])["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {
        "device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 4
    }  # fmt: skip
    assert zero["sub_group_size"] == GROUP_ELEMENTS
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": True}


def test_parameters_follow_where_they_do_not_fit_either() -> None:
    least = {"tiers": ("ldram", "nvme"), "limits": {"ldram": 22 * GIB}}
    plan = planned(**least)
    params = load_model("opt-6.7b").parameters
    assert plan.drive_bytes == 18 * params
    assert plan.of("params")["nvme"] == 2 * params
    param = json.loads(plan.settings["ds_config.json"])["zero_optimization"]["offload_param"]
    assert (param["device"], param["nvme_path"]) == ("nvme", "/scratch")
    assert param["buffer_size"] >= LARGEST + GROUP_ELEMENTS  # of the fullest group
    assert plan.of("params")["ldram"] == 2 * param["buffer_count"] * param["buffer_size"]
    assert plan.tokens_per_s < planned(**TIGHT).tokens_per_s


def test_drive_takes_what_its_rates_give() -> None:
    terms = planned(**TIGHT).phases[0].terms
    drive = load_machine("epyc9354-cxl-a").drives[0]
    assert drive.read_bandwidth_bytes_per_s is not None
    assert drive.write_bandwidth_bytes_per_s is not None
    nbytes = 16 * load_model("opt-6.7b").parameters
    seconds = nbytes / drive.read_bandwidth_bytes_per_s + nbytes / drive.write_bandwidth_bytes_per_s
    assert terms[DRIVE_TERM] == pytest.approx(seconds)
    assert planned(**TIGHT).phases[0].seconds > seconds


def test_drive_is_left_alone_where_memory_holds_all_and_where_no_folder_is_named() -> None:
    plan = planned()
    assert not plan.drive_bytes
    assert "the drive adds nothing" in plan.cxl.reason
    without = planned(nvme_path=None)
    assert without.tokens_per_s == plan.tokens_per_s
    assert "drive" not in without.cxl.reason


@pytest.mark.parametrize("stage", [1, 2])
def test_only_stage_three_has_a_drive(stage: Any) -> None:
    with pytest.raises(ConfigError, match=f"stage {stage} keeps nothing on a drive; leave it out"):
        planned(stage=stage)


def test_plan_that_does_not_fit_says_what_the_drive_holds_and_asks_for_no_other() -> None:
    with pytest.raises(MemoryError, match=r"nvme .*iB; give the host more memory") as refused:
        planned(limits={"ldram": 1 << 20, "nvme": 1 << 20}, tiers=("ldram", "nvme"))
    assert "--nvme-path" not in str(refused.value)
    with pytest.raises(MemoryError, match="--nvme-path"):
        planned(nvme_path=None, limits={"ldram": 1 << 20}, tiers=("ldram",))


@pytest.mark.parametrize("path", ["", "a\nb", "/a\nb", "/dev/null", "~", "relative/folder"])
def test_what_is_no_folder_of_a_drive_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--nvme-path"):
        planned(nvme_path=path)


def test_drive_without_a_folder_or_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tier nvme: .* name one by --nvme-path"):
        planned(nvme_path=None, tiers=("ldram", "nvme"))
    with pytest.raises(ConfigError, match="--nvme-path /scratch: spr3-h100 has no drive whose"):
        planned(machine=load_machine("spr3-h100"))


def test_ranks_are_bound_to_the_planned_cores_where_that_is_asked_for() -> None:
    words = ["plan", "training", "--model", "gpt2-xl", "--machine", "epyc9354-cxl-a", "--json"]
    bound = json.loads(CliRunner().invoke(app, [*words, "--bind-cores"]).stdout)
    free = json.loads(CliRunner().invoke(app, [*words, "--no-bind-cores"]).stdout)
    assert bound["command"][1:4] == [
        "--num_gpus=1", "--bind_cores_to_rank", "--bind_core_list=0-31"
    ]  # fmt: skip
    assert free["command"] == [word for word in bound["command"] if "bind" not in word]
    assert sum(map(int, bound["threads"].values())) == 32
