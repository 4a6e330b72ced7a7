"""``cxl-offload run`` of a plan: its own command, or that of the framework it is for."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cxl_offload.cli.main import main
from cxl_offload.cli.run import plan_command
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.seeded import OptShape, make_opt
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, save_plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

from .run_command import run, stand_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stand_in(tmp_path)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_inference(
        InferenceRequest(
            model=load_model("opt-6.7b"),
            machine=load_machine("epyc9354-cxl-a"),
            prompt=8,
            generated=2,
            model_name="opt-6.7b",
        )
    )


@pytest.fixture(scope="module")
def training() -> Plan:
    return plan_training(
        TrainingRequest(
            model=load_model("opt-13b"),
            machine=load_machine("epyc9354-cxl-a"),
            batch=16,
            tokens=1024,
            tiers=("ldram", "cxl"),
            gpu_usable=0.9,
        )
    )


@pytest.mark.slow(reason="generates twice")
def test_plan_for_flexgen_is_executed_as_it_is(tmp_path: Path) -> None:
    model = make_opt(tmp_path / "my-opt", OptShape(layers=2, hidden=64, heads=4))
    plan = plan_inference(
        InferenceRequest(
            model=load_model(model),
            machine=load_machine("epyc9354-cxl-a"),
            prompt=32,
            generated=2,
            model_name=str(model),
            machine_name="epyc9354-cxl-a",
            gpu_batches=(1,),
            most_batches=1,
        )
    )
    words = ("--output", str(tmp_path / "report.json"))
    save_plan(replace(plan, command=(*plan.command, *words)), tmp_path / "plan.yaml")

    done = run(str(tmp_path / "plan.yaml"), folder=tmp_path)

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["gen_len"], report["machine"]) == (2, "epyc9354-cxl-a")
    assert report["outside"]["accelerator"]["weights"] == plan.of("weights")["gpu"]


def test_plan_that_cannot_run_here_names_what_is_missing(plan: Plan, tmp_path: Path) -> None:
    vllm = replace(plan, executor="vllm", command=("vllm", "serve", "opt-6.7b"))
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ConfigError, match=r"vllm is not installed here.*vllm serve"):
            plan_command(vllm, "plan.yaml", tmp_path)
    with pytest.raises(ConfigError, match="advice only: no way"):
        plan_command(replace(plan, runs=False, advice="no way"), "plan.yaml", tmp_path)
    save_plan(plan, tmp_path / "plan.yaml")
    done = run("--plan", str(tmp_path / "plan.yaml"), "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 2
    assert "is a plan for flexgen and cannot place a training script" in done.stderr


def test_vllm_command_of_a_plan_is_executed(plan: Plan, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "vllm").write_text('#!/bin/sh\necho "vllm $* plan $CXL_OFFLOAD_PLAN"\n')
    (programs / "vllm").chmod(0o755)
    save_plan(
        replace(plan, executor="vllm", command=("vllm", "serve", "opt-6.7b", "--dtype", "auto")),
        tmp_path / "plan.yaml",
    )
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = run("plan.yaml", folder=tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"vllm serve opt-6.7b --dtype auto plan {tmp_path / 'plan.yaml'}\n"


def test_training_plan_is_executed_with_its_configuration_and_its_places(
    folder: Path, training: Plan
) -> None:
    assert training.cxl.used
    save_plan(training, folder / "plan.yaml")
    launcher = folder / "deepspeed"
    launcher.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, subprocess\n"
        "print(' '.join(sys.argv[1:-1]))\n"
        "print(open(sys.argv[-1]).read())\n"
        f"os.environ['PYTHONPATH'] += os.pathsep + {str(folder / 'frameworks')!r}\n"
        "sys.exit(subprocess.call([sys.executable, 'train.py']))\n"
    )
    launcher.chmod(0o755)
    done = run("plan.yaml", folder=folder, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "--num_gpus=1 train.py --deepspeed --deepspeed_config"
    assert training.settings["ds_config.json"] in done.stdout
    assert f"plan {folder / 'plan.yaml'} engine loaded" in said
    assert "nothing was placed" not in done.stderr


def test_metrics_and_events_of_a_program_of_others_are_refused(
    plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of the environment are not: they are for other commands too."""
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    file = str(tmp_path / "plan.yaml")
    save_plan(replace(plan, executor="vllm", command=("vllm", "serve", "opt-6.7b")), file)
    monkeypatch.setenv("CXL_OFFLOAD_METRICS", "9400")
    monkeypatch.setenv("CXL_OFFLOAD_EVENTS", "others.jsonl")
    monkeypatch.chdir(tmp_path)
    events = str(tmp_path / "events.jsonl")
    for option, value in (("--metrics", "9401"), ("--events", events)):
        with pytest.raises(SystemExit) as ended:
            main(["run", option, value, file])
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{option}: a plan for vllm runs a program of others, which does not know it" in line
    with pytest.raises(SystemExit) as ended:
        main(["run", file])
    assert ended.value.code == 0
    ours = replace(plan, executor="flexgen", command=("cxl-offload", "env"))
    save_plan(ours, file)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--metrics", "9401", "--events", events, "--dry-run", file])
    assert ended.value.code == 0
    assert "CXL_OFFLOAD_METRICS=9401" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["absolute", "above", "below", "here", "nameless"])
def test_plan_whose_settings_name_a_file_elsewhere_is_refused_and_writes_nothing(
    training: Plan,
    tmp_path: Path,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = {
        "absolute": str(tmp_path / "written.json"),
        "above": "../written.json",
        "below": "folder/written.json",
        "here": "..",
        "nameless": "''",
    }[where]
    save_plan(training, tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert text.count("ds_config.json:") == 1
    (tmp_path / "plan.yaml").write_text(text.replace("ds_config.json:", f"{name}:"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cxl_offload.cli.run._run", lambda *_, **__: pytest.fail("it was run"))
    for words in (["--dry-run", "plan.yaml"], ["plan.yaml"]):
        with pytest.raises(SystemExit) as ended:
            main(["run", *words])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert "in settings is the name of a file beside others, without a folder" in said
        assert said.count("\n") == 1
        assert not (tmp_path / "written.json").exists()


def test_dry_run_of_a_plan_names_its_settings_and_writes_none(
    training: Plan, tmp_path: Path
) -> None:
    save_plan(training, tmp_path / "plan.yaml")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run("--dry-run", "plan.yaml", folder=tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert "--deepspeed_config ds_config.json" in done.stdout
    assert list(temporary.iterdir()) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("given", ["option", "environment"])
def test_places_of_a_plan_that_is_advice_are_taken_with_a_warning(
    given: str, tmp_path: Path
) -> None:
    model, machine = load_model("opt-1.3b"), load_machine("epyc9354-cxl-a")
    trained = plan_training(TrainingRequest(model=model, machine=machine, batch=8, tokens=512))
    path = str(tmp_path / "plan.yaml")
    options = ["--plan", path] if given == "option" else []
    environment = {"CXL_OFFLOAD_PLAN": path if given == "environment" else ""}
    words = [*options, "--dry-run", "--", "srun", "true"]
    save_plan(replace(trained, runs=False, advice="there is no such GPU"), path)
    done = run(*words, **environment)
    assert (done.returncode, done.stdout) == (0, f"CXL_OFFLOAD_PLAN={path} srun true\n")
    assert done.stderr == (
        f"cxl-offload: warning: {path} is advice only: there is no such GPU; its places are taken "
        "all the same\n"
    )
    save_plan(replace(trained, runs=True, advice=""), path)
    assert run(*words, **environment).stderr == ""
