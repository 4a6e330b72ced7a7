"""Activation checkpointing that a plan counts on is switched on in the run, and keeps its room."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.job import (
    LAYER_BYTES_PER_ELEMENT,
    LOGIT_BYTES,
    LOW_BYTES,
    SCORE_BYTES,
    Stage,
    TrainingJob,
    gpu_bytes,
)
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

from .conftest import run_plan

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

MACHINE = "epyc9354-cxl-a"
LAYERS, WIDTH, HEADS, VOCAB, TOKENS = 8, 64, 4, 128, 64

SCRIPT = f"""
import argparse, json
import cxl_offload
memory = cxl_offload.Session.simulated(cxl_offload.load_machine({MACHINE!r}))
scope = cxl_offload.use(memory)
scope.__enter__()

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
config = GPT2Config(
    n_layer={LAYERS}, n_embd={WIDTH}, n_head={HEADS}, vocab_size={VOCAB}, n_positions={TOKENS},
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager", use_cache=False,
)
model = GPT2LMHeadModel(config)
adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=adam)
kept = {{}}

def keep(tensor):
    storage = tensor.untyped_storage()
    if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in own:
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor

losses = []
text = torch.randint(0, {VOCAB}, (1, {TOKENS}))
for _ in range(3):
    kept.clear()
    own = {{each.untyped_storage().data_ptr() for each in model.parameters()}}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine(input_ids=text, labels=text).loss
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
on = model.is_gradient_checkpointing
print("SAID " + json.dumps({{"losses": losses, "kept": sum(kept.values()), "on": on}}))
"""


def planned(stage: Stage, *, checkpointing: bool, offloaded: bool = False) -> Plan:
    """A model that fits a GPU only with checkpoints, or one that fits as it is."""
    machine, model = load_machine(MACHINE), load_model("opt-6.7b" if offloaded else "gpt2-xl")
    tokens = model.positions
    job = TrainingJob(model=model, batch=1, tokens=tokens)
    memory = machine.gpus[0].memory_bytes
    assert memory
    need = gpu_bytes(job, 1, stage, checkpointing=checkpointing, offloaded=offloaded)
    return plan_training(
        TrainingRequest(
            model=model, machine=machine, batch=1, tokens=tokens, stage=stage, tiers=("ldram",),
            gpu_usable=1.001 * need / memory, offload_checkpoints=offloaded,
        )
    )  # fmt: skip


def ran(folder: Path, plan: Plan, script: str = SCRIPT) -> tuple[dict[str, Any], str]:
    done = run_plan(folder, plan, script)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if "SAID " in line)
    said: dict[str, Any] = json.loads(line.partition("SAID ")[2])
    return said, done.stdout + done.stderr


@pytest.mark.parametrize("stage", [2, 3])
def test_what_the_backward_is_kept_is_what_the_plan_counts(
    deepspeed_there: None, tmp_path: Path, stage: Stage
) -> None:
    """The control is a plan without checkpoints: it keeps all layers, and has the same losses."""
    runs = {}
    for checkpointing in (True, False):
        (folder := tmp_path / str(checkpointing)).mkdir()
        plan = planned(stage, checkpointing=checkpointing)
        assert plan.checkpointing is checkpointing
        runs[checkpointing], _ = ran(folder, plan)
        assert runs[checkpointing]["on"] is checkpointing
    layer = LAYER_BYTES_PER_ELEMENT * TOKENS * WIDTH + SCORE_BYTES * HEADS * TOKENS**2
    logits = LOGIT_BYTES * TOKENS * VOCAB
    checkpoints = LOW_BYTES * TOKENS * WIDTH * LAYERS
    assert runs[True]["kept"] + checkpoints <= checkpoints + max(layer, logits)
    assert runs[False]["kept"] > 3 * (checkpoints + max(layer, logits))
    assert runs[True]["losses"] == runs[False]["losses"]
    assert len(set(runs[True]["losses"])) == 3


def test_a_model_of_its_own_is_said_to_need_it(deepspeed_there: None, tmp_path: Path) -> None:
    hidden = "model.gradient_checkpointing_enable = None\nadam = Deep"
    _, output = ran(tmp_path, planned(2, checkpointing=True), SCRIPT.replace("adam = Deep", hidden))
    assert "the plan counts on activation checkpointing: GPT2LMHeadModel has no" in output


WIDE_SCRIPT = (
    SCRIPT.replace(f"n_embd={WIDTH}", "n_embd=512")
    .replace(f"n_layer={LAYERS}", "n_layer=3")
    .replace(f"n_positions={TOKENS}", "n_positions=256")
    .replace(f"(1, {TOKENS})", "(1, 256)")
    .replace(
        "kept = {}", "kept, there = {}, []\nasked = lambda: memory.stats().asked_bytes.current"
    )
    .replace("    kept.clear()", "    kept.clear()\n    before = asked()")
    .replace(
        "    engine.backward(loss)", "    there.append(asked() - before)\n    engine.backward(loss)"
    )
    .replace('"on": on}', '"on": on, "there": there, "tier": tier.current_bytes}')
    .replace("print(", "tier = memory.stats().tiers['cxl']\nprint(")
)
"""The same with checkpoints that are large enough to leave, 256 KiB each."""


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_lie_on_the_tier_of_the_plan_between_forward_and_backward(
    deepspeed_there: None, tmp_path: Path, stage: Stage
) -> None:
    """The control keeps them where they were made, and has the same losses."""
    runs = {}
    for offloaded in (True, False):
        (folder := tmp_path / str(offloaded)).mkdir()
        plan = planned(stage, checkpointing=True, offloaded=offloaded)
        assert plan.checkpointing
        assert bool(plan.of("activations")) is offloaded
        homes = [
            replace(home, policy="bind:cxl") if home.kind == "activations" else home
            for home in plan.homes
        ]
        runs[offloaded], _ = ran(folder, replace(plan, homes=tuple(homes)), WIDE_SCRIPT)
    checkpoints = LOW_BYTES * 256 * 512 * 3
    # The engine's own tensors come at its first forward.
    assert runs[True]["there"][1:] == [checkpoints] * 2
    assert runs[False]["there"][1:] == [0] * 2
    assert runs[True]["tier"] >= checkpoints > runs[False]["tier"] == 0
    assert runs[False]["kept"] - runs[True]["kept"] >= 0.99 * checkpoints
    assert runs[True]["losses"] == runs[False]["losses"]
    assert len(set(runs[True]["losses"])) == 3


def test_a_model_whose_layers_make_checkpoints_otherwise_is_said_to_need_it(
    deepspeed_there: None, tmp_path: Path
) -> None:
    own = "model.gradient_checkpointing_enable = lambda **_: None\nadam = Deep"
    plan = planned(2, checkpointing=True, offloaded=True)
    _, output = ran(tmp_path, plan, SCRIPT.replace("adam = Deep", own))
    assert "GPT2LMHeadModel has no _gradient_checkpointing_func in its layers" in output
