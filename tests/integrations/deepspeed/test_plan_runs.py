"""A plan of training, for a machine that is not here, run as it is by the real DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import save_plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

from .conftest import ROOT, environment

pytestmark = pytest.mark.usefixtures("default_port")

MACHINE = "epyc9354-cxl-a"

# Only its first lines know of this package: the nodes of the plan's machine are simulated.
SCRIPT = f"""
import argparse, json
import cxl_offload
memory = cxl_offload.Session.simulated(cxl_offload.load_machine({MACHINE!r}))
scope = cxl_offload.use(memory)
scope.__enter__()

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.integrations.deepspeed.tiny import TinyModel, batches

torch.manual_seed(0)
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
model = TinyModel()
adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=adam)
losses = []
for inputs, targets in batches(2 * engine.gradient_accumulation_steps(), seed=0, rank=0):
    loss = engine(inputs, targets)
    engine.backward(loss)
    engine.step()
    losses.append(float(loss))
nodes = {{str(node): use.current_bytes for node, use in memory.stats().nodes.items()}}
print("SAID " + json.dumps({{
    "losses": losses,
    "nodes": nodes,
    "stage": engine.zero_optimization_stage(),
    "accumulation": engine.gradient_accumulation_steps(),
}}))
"""


def test_plan_over_two_tiers_runs_and_fills_both(deepspeed_there: None, tmp_path: Path) -> None:
    plan = plan_training(
        TrainingRequest(
            model=load_model("opt-13b"),
            machine=load_machine(MACHINE),
            batch=16,
            tokens=1024,
            tiers=("ldram", "cxl"),
            gpu_usable=0.9,
        )
    )
    assert plan.cxl.used
    save_plan(plan, tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text(SCRIPT)
    given = environment(2)  # without ranks: the launcher gives them
    done = subprocess.run(
        [sys.executable, "-m", "cxl_offload.cli.main", "run", "plan.yaml"],
        cwd=tmp_path,
        env=given | {"PYTHONPATH": os.pathsep.join([str(ROOT), given["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if "SAID " in line)
    said = json.loads(line.partition("SAID ")[2])
    zero = json.loads(plan.settings["ds_config.json"])["zero_optimization"]
    assert said["stage"] == zero["stage"]
    assert said["accumulation"] == plan.batch.count
    assert said["losses"][-1] == pytest.approx(said["losses"][0], rel=0.5)
    cxl = load_machine(MACHINE).tier("cxl").nodes[0]
    assert said["nodes"][str(cxl)] > 0
    assert said["nodes"]["0"] > 0
    assert "nothing was placed" not in done.stderr
