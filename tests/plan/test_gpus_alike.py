"""Plans for several GPUs take all to be like the first, so GPUs of different kinds are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.prices import Prices
from cxl_offload.plan.fleet.search import FleetPlanner
from cxl_offload.plan.fleet.streams import DrawnStream
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.gpu_kinds import check_alike
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.plan import plan_training
from cxl_offload.plan.training.ranks import Ranks
from cxl_offload.plan.training.request import TrainingRequest
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.vllm.serving import TokenTargets
from cxl_offload.topology import Gpu, Machine, load_machine

GIB = 1 << 30
H100 = load_machine("dgx-h100").gpus[0]
A10 = replace(load_machine("epyc9354-cxl-a").gpus[0], name="second", node=0)


def with_second(other: Gpu) -> Machine:
    return replace(load_machine("dgx-h100"), gpus=(H100, other))


def served(machine: Machine, gpus: int) -> VllmRequest:
    model = load_model("llama-2-7b")
    return VllmRequest(
        model=model, machine=machine, model_name="m", prompt=64, generated=32, gpus=gpus,
        replay=None, prices=False,
    )  # fmt: skip


def fleet(machine: Machine, gpus: int) -> object:
    target = TokenTargets(first_token=10.0)
    plans = FleetPlanner(served(machine, gpus), DrawnStream(0.1, 64, 32), target)
    return plans.option(256 * GIB, 0, Prices(server=1.0, dram=1.0), servers=1)


def trained(machine: Machine, gpus: int) -> Plan:
    model = load_model("opt-1.3b")
    return plan_training(
        TrainingRequest(
            model=model, machine=machine, batch=8, tokens=256, ranks=Ranks(gpus=gpus),
            replay=None, prices=False,
        )
    )  # fmt: skip


PLANS: list[Callable[[Machine, int], object]] = [
    lambda machine, gpus: plan_vllm(served(machine, gpus)),
    trained,
    fleet,
]


@pytest.mark.parametrize("plan", PLANS, ids=["vllm", "training", "fleet"])
def test_plan_for_gpus_of_two_kinds_is_refused_in_one_line(
    plan: Callable[[Machine, int], object],
) -> None:
    with pytest.raises(ConfigError) as told:
        plan(with_second(A10), 2)
    said = str(told.value)
    assert "\n" not in said
    assert "GPU H100 (NVIDIA H100 80GB HBM3, 80 GiB) and GPU second (" in said
    assert "24 GiB) of dgx-h100 differ in " in said
    assert "--gpus 1 plans for the first alone" in said


@pytest.mark.parametrize("plan", PLANS, ids=["vllm", "training", "fleet"])
def test_links_may_differ_and_one_gpu_is_planned_for_beside_any_other(
    plan: Callable[[Machine, int], object],
) -> None:
    link = replace(H100.link, h2d_bandwidth_bytes_per_s=1e10)  # type: ignore[type-var]
    plan(with_second(replace(H100, name="second", link=link)), 2)
    assert plan(with_second(A10), 1) == plan(load_machine("dgx-h100"), 1)


@pytest.mark.parametrize("name", ["transformers", "flexgen"])
def test_executors_on_one_gpu_plan_with_the_first(name: str) -> None:
    def made(machine: Machine) -> Plan:
        common: dict[str, Any] = {
            "model": load_model("opt-1.3b"), "machine": machine, "prompt": 64, "generated": 8,
            "replay": None, "prices": False,
        }  # fmt: skip
        if name == "flexgen":
            return plan_inference(InferenceRequest(**common, model_name="m"))
        return plan_transformers(TransformersRequest(**common, model_name="m"))

    assert made(with_second(A10)) == made(load_machine("dgx-h100"))


@pytest.mark.parametrize(
    ("changes", "unlike"),
    [
        ({"model": "NVIDIA H100 PCIe"}, "model"),
        ({"memory_bytes": 40 * GIB}, "memory"),
        ({"memory_bandwidth_bytes_per_s": 2e12}, "memory bandwidth"),
        ({"peak_flops_per_s": 5e14}, "peak"),
        ({"memory_bytes": 40 * GIB, "peak_flops_per_s": 5e14}, "memory and peak"),
    ],
)
def test_each_difference_is_named(changes: dict[str, Any], unlike: str) -> None:
    other = replace(H100, name="second", **changes)
    with pytest.raises(ConfigError, match=f" differ in {unlike}, and a plan"):
        check_alike(with_second(other), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 79 * GIB},  # what a driver leaves of the same card
        {"memory_bytes": None, "peak_flops_per_s": None, "memory_bandwidth_bytes_per_s": None},
        {"model": ""},
        {"node": None, "link": None},
    ],
)
def test_what_is_no_known_difference_is_planned(changes: dict[str, Any]) -> None:
    check_alike(with_second(replace(H100, name="second", **changes)), 2)


def test_gpu_without_numbers_has_those_of_its_kind() -> None:
    found = Gpu("gpu1", node=0, model="NVIDIA A10", memory_bytes=None)
    unnamed = replace(H100, model="")
    machine = replace(load_machine("dgx-h100"), gpus=(unnamed, found))
    with pytest.raises(ConfigError, match="differ in memory, memory bandwidth and peak"):
        check_alike(machine, 2)


def test_those_before_the_one_that_differs_are_counted() -> None:
    twin = replace(H100, name="twin")
    machine = replace(load_machine("dgx-h100"), gpus=(H100, twin, A10))
    check_alike(machine, 2)
    with pytest.raises(ConfigError, match="--gpus 2 plans for the first 2, which are alike"):
        check_alike(machine, 8)


def test_command_line_names_both(tmp_path: Path) -> None:
    text = Path(__file__).parents[2].joinpath("configs/machines/dgx-h100.yaml").read_text()
    start, end = text.index("  - name: H100"), text.index("tiers:")
    second = text[start:end].replace("name: H100", "name: other").replace("80 GiB", "24 GiB")
    second = second.replace("&usable ", "").replace(
        "*usable", '{value: 9 GB/s, assumed: true, reason: "x"}'
    )
    path = tmp_path / "mixed.yaml"
    path.write_text(text[:end] + second + text[end:])
    asked = ["plan", "inference", "--model", "llama-2-7b", "--machine", str(path), "--gpus", "2"]
    result = CliRunner().invoke(app, asked)
    said = " ".join(result.output.split())
    assert result.exit_code != 0, said
    assert "--gpus 2: GPU H100 (" in said
    assert "and GPU other (" in said
