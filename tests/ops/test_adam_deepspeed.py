"""CPUAdam as the client optimizer of DeepSpeed's ZeRO-Offload, where DeepSpeed is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("deepspeed")

# A process of its own: DeepSpeed sets up torch.distributed and an accelerator for good.
SCRIPT = """
import json, sys
import deepspeed, torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from cxl_offload.ops.adam import CPUAdam

stage, which = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
kind = CPUAdam if which == "ours" else DeepSpeedCPUAdam
optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
source = torch.Generator().manual_seed(1)
losses = []
for _ in range(12):
    x = torch.randn(8, 32, generator=source)
    loss = (engine(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print(json.dumps({"type": type(engine.optimizer.optimizer).__name__, "losses": losses}))
engine.destroy()
"""


def train(stage: int, which: str, port: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stage), which],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


@pytest.mark.slow(reason="the first time, DeepSpeed compiles its own kernel: two minutes")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_follow_those_of_deepspeed_adam(stage: int) -> None:
    ours = train(stage, "ours", 29610 + stage)
    theirs = train(stage, "theirs", 29620 + stage)
    assert ours["type"] == "CPUAdam"
    # The masters differ in the last bits of float32, which the bfloat16 weights rarely show.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-2)
    assert ours["losses"][-1] < ours["losses"][0]
