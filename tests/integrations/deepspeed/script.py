"""A training script as a user has it, who never heard of this package: ``script OUTPUT``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import deepspeed
import torch

from tests.integrations.deepspeed.tiny import TinyModel, batches, config


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("output")
    arguments.add_argument("--stage", type=int, default=2)
    arguments.add_argument("--local_rank", type=int, default=-1)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = TinyModel()
    rank = int(os.environ["RANK"])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config({"stage": given.stage, "accumulation": 2}),
    )
    losses = []
    for inputs, targets in batches(4, seed=1, rank=rank):
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    Path(f"{given.output}.{rank}").write_text(json.dumps(losses))
    # A collective still in flight at the end of the interpreter aborts the process (PyTorch).
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
