"""``cxl-offload run`` with the real DeepSpeed: a script that knows nothing of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cxl_offload import discover

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow(reason="starts DeepSpeed twice, with every launcher")

ROOT = Path(__file__).parents[2]
NODE = discover().initiator

TRAIN = """
import argparse, json, deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--output")
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": zero,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})
rank = torch.distributed.get_rank()
source = torch.Generator().manual_seed(rank)
losses = []
for _ in range(4):
    loss = engine(torch.randn(4, 64, generator=source).bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item().hex())
states = engine.optimizer.optimizer.state
found = {name: states[param][name] for param in states for name in ("exp_avg", "exp_avg_sq")}
# Only the test asks where they are; the training above is any script's. Ranks that share a machine
# have sessions of their own, which know what was asked for.
import gc
from cxl_offload import Session, placement_of
places = dict.fromkeys(found)
for session in [each for each in gc.get_objects() if type(each) is Session]:
    for name, state in found.items():
        places[name] = places[name] or placement_of(state, session=session).requested
open(f"{args.output}.{rank}", "w").write(json.dumps({"losses": losses, "places": places}))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

LAUNCHERS = {
    "python": ([sys.executable], 1),
    "torchrun": (
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port=29581",
        ],
        2,
    ),
    "deepspeed": (["deepspeed", "--num_accelerators", "2", "--master_port", "29582"], 2),
}


def train(folder: Path, launcher: str, prefix: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What every rank wrote, and what was printed on stderr."""
    (folder / "train.py").write_text(TRAIN)
    command, count = LAUNCHERS[launcher]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": here}
    if launcher == "python":
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}
    done = subprocess.run(
        [*prefix, *command, "train.py", "--output", str(folder / "result")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(count)], (
        done.stderr
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_as_it_is_has_its_states_placed_and_the_same_losses(
    tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "stock").mkdir()
    (tmp_path / "placed").mkdir()
    run = [
        sys.executable,
        "-m",
        "cxl_offload.cli.main",
        "run",
        "--plan",
        f"exp_avg=bind:{NODE}",
        "--",
    ]
    stock, _ = train(tmp_path / "stock", launcher, [])
    placed, printed = train(tmp_path / "placed", launcher, run)
    for one, other in zip(placed, stock, strict=True):
        assert one["losses"] == other["losses"]
        assert one["places"]["exp_avg"] == f"bind to nodes {{{NODE}}}"
        assert one["places"]["exp_avg_sq"].startswith("prefer")
        assert other["places"] == {"exp_avg": None, "exp_avg_sq": None}
    assert "nothing was placed" not in printed
