"""Training on machines without a GPU: one is assumed, the plan is advice, and its notes say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.errors import ConfigError
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.training.assumed_gpu import ASSUMED_GPU, with_assumed_gpu
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.topology import Gpu, Machine, load_machine, machine_names

WITHOUT = (
    "emr-1", "emr-2", "emr-3", "spr-1", "spr-2", "xeon6126-host", "xeon6430", "xeon6438y-cxl-c",
    "xeon8468", "xeon8470-cxl-b", "zen4-1", "zen4-3", "zen5-1",
)  # fmt: skip
"""Machine files that list no GPU, read off them by hand."""

ONE_MEMORY = "zen4-2-mi300a"
"""Its CPUs compute in the memory of its GPUs."""


def request(machine: Machine, **extra: Any) -> TrainingRequest:
    given: dict[str, Any] = {"batch": 4, "tokens": 512, "prices": False, **extra}
    return TrainingRequest(model=load_model("gpt2"), machine=machine, **given)


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_is_planned_and_says_what_it_lacks(name: str) -> None:
    plan = plan_training(request(load_machine(name)))
    assert plan.tokens_per_s > 0
    if name not in (*WITHOUT, ONE_MEMORY):
        assert plan.runs
        assert not any("assumed:" in note for note in plan.notes)
        return
    assert (plan.runs, plan.advice) == (False, f"planned as if GPU {ASSUMED_GPU} were there")
    lacks = "share one memory" if name == ONE_MEMORY else "has none"
    assert plan.notes[0].startswith(f"GPU {ASSUMED_GPU} assumed: ")
    assert all(each in plan.notes[0] for each in (name, lacks, "--gpu NAME takes another"))


def test_what_it_has_not_room_for_is_said_of_the_assumed_gpu() -> None:
    assumed = replace(request(load_machine("spr-1")), tokens=1024, batch=1, gpu_usable=1e-3)
    given = replace(assumed, machine=with_gpu(assumed.machine, ASSUMED_GPU))
    with pytest.raises(MemoryError, match=rf"GPU's usable \S+ \S+ \(GPU {ASSUMED_GPU} assumed\), "):
        plan_training(assumed)
    with pytest.raises(MemoryError, match=r"GPU's usable \S+ \S+, and"):
        plan_training(given)


@pytest.mark.parametrize("name", ["spr-1", ONE_MEMORY])
def test_the_plan_is_the_one_with_that_gpu_on_paper(name: str) -> None:
    machine = load_machine(name)
    assumed = plan_training(request(machine))
    given = plan_training(request(with_gpu(machine, ASSUMED_GPU)))
    other = plan_training(request(with_gpu(machine, "t4")))
    assert assumed.phases == given.phases
    assert assumed.homes == given.homes
    assert assumed.notes[1:] == given.notes
    assert other.phases[0].terms["forward (GPU)"] > given.phases[0].terms["forward (GPU)"]


def test_gpu_of_the_machine_is_left_alone() -> None:
    machine = load_machine("epyc9354-cxl-a")
    assert with_assumed_gpu(machine) == (machine, "")


def test_gpu_of_a_model_that_no_file_knows_is_its_owners_to_describe() -> None:
    machine = load_machine("spr-1")
    unknown = replace(machine, gpus=(Gpu("gpu0", model="Some Card 9000"),))
    with pytest.raises(ConfigError, match="no peak rates, and no machine file knows Some Card"):
        plan_training(request(unknown))


PLAN = ["plan", "training", "--machine", "spr-1", "--model", "gpt2", "--batch", "4"]


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*PLAN, *arguments, "--json"])
    assert done.exit_code == 0, done.output
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_command_line_says_the_same_as_the_function() -> None:
    made = planned()
    assert (made["runs"], made["advice"]) == (False, "planned as if GPU h100 were there")
    assert made["notes"][0].startswith("GPU h100 assumed: spr-1 has none")


def test_another_gpu_takes_its_place() -> None:
    made = planned("--gpu", "a10")
    assert made["advice"] == "planned as if GPU a10 were there"
    assert not any("assumed: spr-1" in note for note in made["notes"])


def test_all_that_is_not_there_is_in_the_advice() -> None:
    made = planned("--add", "cxl=64GiB:20GB/s:300ns", "--gpus", "2")
    assert made["advice"] == "planned as if cxl=64GiB:20GB/s:300ns and 2 GPUs h100 were there"
    assert not any("spr-1 has one GPU" in note for note in made["notes"])


def test_no_gpu_at_all_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("none", "None"):
        with pytest.raises(SystemExit) as ended:
            main([*PLAN, "--gpu", word])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"--gpu {word}: no training is planned for CPUs alone; leave it out, or" in said
        assert said.count("\n") == 1


def test_page_of_a_plan_with_an_assumed_gpu_is_written(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    planned("--report", str(page))
    assert "h100" in page.read_text(encoding="utf-8")
