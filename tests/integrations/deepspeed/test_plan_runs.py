"""A plan of training, for a machine that is not here, run as it is by the real DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

from .conftest import run_plan

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
    done = run_plan(tmp_path, plan, SCRIPT)
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
