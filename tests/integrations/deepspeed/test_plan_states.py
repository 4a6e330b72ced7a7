"""States of the type that a plan counts on, made by the hook in a script that does not name it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import load_plan, save_plan
from cxl_offload.plan.training.job import Stage
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

from .conftest import run_folder, run_plan

MACHINE = "epyc9354-cxl-a"

SCRIPT = f"""
import argparse, json, os
import cxl_offload
memory = cxl_offload.Session.simulated(cxl_offload.load_machine({MACHINE!r}))
scope = cxl_offload.use(memory)
scope.__enter__()

import deepspeed
import torch
from cxl_offload import CPUAdam
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.integrations.deepspeed.tiny import TinyModel, batches

torch.manual_seed(0)
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
model = TinyModel()
adam = ADAM(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=adam)
if (folder := os.environ.get("RESUME")) and os.path.exists(folder):
    engine.load_checkpoint(folder)
losses = []
for inputs, targets in batches(2 * engine.gradient_accumulation_steps(), seed=0, rank=0):
    loss = engine(inputs, targets)
    engine.backward(loss)
    engine.step()
    losses.append(float(loss))
if folder and not os.path.exists(folder):
    engine.save_checkpoint(folder)
kept = {{}}
for state in adam.state.values():
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            kept[name] = str(value.dtype)
weights = torch.cat([each.detach().flatten().float() for each in model.parameters()])
print("SAID " + json.dumps({{"losses": losses, "kept": kept, "weights": weights.tolist()}}))
"""


def ran(
    folder: Path,
    adam: str,
    state_dtypes: tuple[str, ...],
    stage: Stage,
    resume: str = "",
    options: str = "",
) -> subprocess.CompletedProcess[str]:
    plan = plan_training(
        TrainingRequest(
            model=load_model("gpt2"),
            machine=load_machine(MACHINE),
            batch=2,
            tokens=512,
            tiers=("ldram",),
            stage=stage,
            state_dtypes=state_dtypes,
        )
    )
    assert plan.state_dtype == (state_dtypes[0] if state_dtypes else "")
    script = SCRIPT.replace("ADAM(", f"{adam}(").replace("lr=1e-3", f"lr=1e-3{options}")
    return run_plan(folder, plan, script, {"RESUME": resume})


@pytest.mark.parametrize(
    ("dtype", "stage", "kept"),
    [
        ("bfloat16", 2, {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.bfloat16"}),
        (
            "uint8",
            3,
            {
                f"exp_avg{sq}_{part}": "torch.uint8"
                for sq in ("", "_sq")
                for part in ("codes", "scales")
            },
        ),
        ("", 2, {"exp_avg": "torch.float32", "exp_avg_sq": "torch.float32"}),
    ],
)
def test_states_are_of_the_type_of_the_plan(
    deepspeed_there: None, tmp_path: Path, dtype: str, stage: Stage, kept: dict[str, str]
) -> None:
    """The control is a plan that allows no type: its states are those of the constructor."""
    done = ran(tmp_path, "CPUAdam", (dtype,) if dtype else (), stage)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if "SAID " in line)
    said = json.loads(line.partition("SAID ")[2])
    assert said["kept"] == kept
    assert said["losses"][-1] == pytest.approx(said["losses"][0], rel=0.5)


def test_an_optimizer_without_such_states_is_refused_before_it_trains(
    deepspeed_there: None, tmp_path: Path
) -> None:
    done = ran(tmp_path, "DeepSpeedCPUAdam", ("uint8",), 2)
    assert done.returncode != 0
    assert "states in uint8, which DeepSpeedCPUAdam does not have" in done.stdout + done.stderr
    assert "SAID" not in done.stdout


def test_states_of_a_checkpoint_are_converted(deepspeed_there: None, tmp_path: Path) -> None:
    """A run in float32 saves, one whose plan has 8 bits goes on; a fresh one is the control."""
    losses = {}
    for name, dtypes in (("saved", ()), ("resumed", ("uint8",)), ("fresh", ("uint8",))):
        resume = "" if name == "fresh" else str(tmp_path / "kept")
        (folder := tmp_path / name).mkdir()
        done = ran(folder, "CPUAdam", dtypes, 2, resume)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        line = next(line for line in done.stdout.splitlines() if "SAID " in line)
        said = json.loads(line.partition("SAID ")[2])
        assert set(said["kept"].values()) == {"torch.uint8" if dtypes else "torch.float32"}
        losses[name] = said["losses"]
    assert losses["fresh"][0] == losses["saved"][0]
    assert losses["resumed"][0] < losses["fresh"][0]


def test_states_of_a_checkpoint_in_the_type_of_the_plan_are_taken_as_they_are(
    deepspeed_there: None, tmp_path: Path
) -> None:
    """The script names no type; the control names it, so that its optimizer reads codes at once."""
    weights = {}
    for name, options in (("saved", ""), ("resumed", ""), ("named", ", state_dtype=torch.uint8")):
        (folder := tmp_path / name).mkdir()
        done = ran(folder, "CPUAdam", ("uint8",), 2, str(tmp_path / "kept"), options)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        line = next(line for line in done.stdout.splitlines() if "SAID " in line)
        weights[name] = json.loads(line.partition("SAID ")[2])["weights"]
    assert weights["resumed"] == weights["named"]
    assert weights["resumed"] != weights["saved"]


def line_of_refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What the script ends with: one line, and no traceback of its own."""
    assert done.returncode != 0
    assert "SAID" not in done.stdout
    assert "Traceback" not in done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    (line,) = [each for each in lines if "cxl-offload: error:" in each]
    return line


def test_overlap_under_a_plan_says_in_one_line_what_keeps_it_from_beginning(
    deepspeed_there: None, tmp_path: Path
) -> None:
    """The configuration of the plan says nothing of clipping, and DeepSpeed's default clips."""
    done = ran(tmp_path, "CPUAdam", (), 2, options=", overlap=True")
    planned = load_plan(tmp_path / "plan.yaml")
    assert "gradient_clipping" not in planned.settings["ds_config.json"]
    line = line_of_refusal(done)
    assert "clipped to a norm of 1, for which all of them have to be there" in line
    assert "(1 where the configuration says nothing); give gradient_clipping and set it" in line
    assert "check_grad_overflow may skip a step; set it to false" in line, "all that keeps it"


def test_script_without_an_optimizer_ends_with_the_line_that_names_the_remedy(
    deepspeed_there: None, tmp_path: Path
) -> None:
    plan = plan_training(
        TrainingRequest(
            model=load_model("gpt2"), machine=load_machine(MACHINE), batch=2, tokens=512, stage=2
        )
    )
    save_plan(plan, tmp_path / "plan.yaml")
    script = SCRIPT.replace("adam = ADAM(model.parameters(), lr=1e-3)", "adam = None")
    (tmp_path / "train.py").write_text(script)
    line = line_of_refusal(run_folder(tmp_path))
    assert "the script gives DeepSpeed no optimizer" in line
    assert "cxl_offload.CPUAdam(model.parameters(), lr=...)" in line


def test_states_that_the_script_asks_for_give_way_to_those_of_the_plan_with_a_line(
    deepspeed_there: None, tmp_path: Path
) -> None:
    done = ran(tmp_path, "CPUAdam", ("bfloat16",), 2, options=", state_dtype=torch.uint8")
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in (done.stdout + done.stderr).splitlines() if "states in" in line]
    assert len(said) == 1
    assert (
        "states in bfloat16 are kept, not those in uint8 that the script gives CPUAdam" in said[0]
    )
    assert "torch.bfloat16" in done.stdout
