"""offload_activations around the forward of real ZeRO engines: the same losses, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow(reason="imports DeepSpeed and makes four engines")

ROOT = Path(__file__).parents[2]

# Stage 3 frees parameters after the forward and gathers them elsewhere for the backward.
SCRIPT = """
import contextlib, json, sys
import deepspeed, torch
from torch import nn
import cxl_offload
from cxl_offload import Session, load_machine

torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def train(stage, offload):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(64, 1))
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        zero |= {"offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        with offload:
            loss = engine(torch.randn(8, 64, generator=source).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    del loss
    engine.destroy()
    return losses

session = Session.simulated(load_machine("epyc9354-cxl-a"))
found = {}
with cxl_offload.use(session):
    for stage in (2, 3):
        offload = cxl_offload.offload_activations("cxl", min_bytes=1, prefetch=2)
        stock, ours = train(stage, contextlib.nullcontext()), train(stage, offload)
        found[stage] = {"stock": stock, "ours": ours, "copies": offload.use.copies,
                        "left": session.stats().asked_bytes.current}
open(sys.argv[1], "w").write(json.dumps(found))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_losses_of_stages_2_and_3_are_the_same_bits(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29585"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "found.json")],
        env={**os.environ, **alone, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for stage, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["ours"] == found["stock"], stage
        assert found["copies"] > 0
        assert found["left"] == 0
