"""A small language model and its data, the same in every process that asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cxl_offload.ops import shared_cpus

VOCAB, WIDTH, LAYERS, TOKENS, ROWS = 256, 64, 2, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(self.before(x)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(attended)
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class TinyModel(nn.Module):
    """Gives the loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float().view(-1, VOCAB)
        return nn.functional.cross_entropy(logits, targets.view(-1))


def batches(count: int, *, seed: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1000 * seed + rank)
    text = torch.randint(0, VOCAB, (8 * TOKENS,), generator=made)
    for _ in range(count):
        starts = torch.randint(0, 7 * TOKENS - 1, (ROWS,), generator=made)
        windows = torch.stack([text[at : at + TOKENS + 1] for at in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def config(job: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration for one job of the worker."""
    pin = job.get("pin", True)
    zero: dict[str, Any] = {
        "stage": job["stage"],
        "offload_optimizer": {"device": "cpu", "pin_memory": pin},
        "overlap_comm": job.get("overlap", True),
        "contiguous_gradients": True,
        "reduce_bucket_size": 20_000,
        "allgather_bucket_size": 20_000,
    }
    if job["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20_000}
        zero |= {"sub_group_size": job.get("sub_group", 60_000)}
        if job.get("offload_param"):
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": job.get("accumulation", 1),
        "gradient_clipping": job.get("clip", 0.0),
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if job.get("dtype", "bf16") == "bf16":
        made["bf16"] = {"enabled": True} | job.get("bf16", {})
    else:
        made["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 4}
    if job.get("optimizer", "DeepSpeedCPUAdam") == "DeepSpeedCPUAdam":
        settings = {"lr": 1e-2, "weight_decay": 0.01}
        made["optimizer"] = {"type": "AdamW", "params": settings}
    else:
        made |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return made


def checkpoint_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def watches_cpus() -> bool:
    """Whether waiting threads would sleep where other programs want the CPUs."""
    return shared_cpus._known is not None and shared_cpus._known() is not None
