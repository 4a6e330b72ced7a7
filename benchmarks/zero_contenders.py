"""The engines that bench_zero_offload.py compares, and the bound; called, each makes a sample."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import cxl_offload
from benchmarks.quiet_window import Window
from benchmarks.zero_report import OURS, STOCK, Sample
from cxl_offload import _C
from cxl_offload.ops.adam import CPUAdam

BLOCK = 32  # elements of a block of the bound's streams
STREAMS = (False, True, True, True)  # gradient is read; parameter and two states are written too
AHEAD_BYTES = (0, 512, 1024, 2048, 4096)
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


@dataclass
class Contender:
    """An engine, and the window of its optimizer; ``losses`` of all its steps."""

    engine: Any
    batches: Iterator[torch.Tensor]
    window: Window
    losses: list[float] = field(default_factory=list)

    def __call__(self) -> Sample:
        tokens = next(self.batches)
        self.window.reset()
        begin = self.window.now()
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        middle = self.window.now()
        self.engine.step()
        end = self.window.now()
        self.losses.append(loss.item())
        return {"optimizer": self.window.seconds, "engine.step": end - middle, "step": end - begin}

    def watch(self, owner: torch.optim.Optimizer, *, begins: bool) -> None:
        """Called around every ``optimizer.step()`` of the process, hooks of others included."""
        if owner is self.engine.optimizer.optimizer:
            self.window.open() if begins else self.window.close()


@dataclass
class Bound:
    """The optimizer's bytes without its arithmetic, at the best prefetch distance."""

    numel: int
    threads: int
    window: Window

    def __post_init__(self) -> None:
        count = self.numel // 64 * 64
        # The streams are addresses: their memory is kept here.
        self._data = [cxl_offload.zeros(count, dtype=torch.float32, pages="thp") for _ in STREAMS]
        pilots = {ahead: min(self._run(ahead) for _ in range(5)) for ahead in AHEAD_BYTES}
        self._best = min(pilots, key=lambda ahead: pilots[ahead])

    def __call__(self) -> Sample:
        self._run(self._best)  # what others left in the caches and page tables is not timed
        return {"optimizer": self._run(self._best)}

    def _run(self, ahead: int) -> float:
        lines = BLOCK * 4 // 64
        streams = [(t.data_ptr(), lines, w) for t, w in zip(self._data, STREAMS, strict=True)]
        cpus = _C.allowed_cpus()
        chosen = [cpus[i % len(cpus)] for i in range(self.threads)]
        self.window.reset()
        self.window.open()
        _C.update_traffic(streams, self.numel // 64 * 2, chosen, ahead_bytes=ahead)
        self.window.close()
        return self.window.seconds


def zero_config(args: argparse.Namespace, *, own: bool) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": True}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": args.stage, "offload_optimizer": offload},
    }
    if own:
        return made | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return made | {"optimizer": {"type": "AdamW", "params": SETTINGS}}


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            word_embed_proj_dim=args.hidden,
            ffn_dim=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            max_position_embeddings=args.length,
            dropout=0.0,
        )
    )


def batches(vocabulary: int, rows: int, length: int) -> Iterator[torch.Tensor]:
    """Always the same ones, for every contender."""
    source = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(4, vocabulary, (rows, length), generator=source)


def engine_of(args: argparse.Namespace, *, own: bool) -> Any:
    import deepspeed

    model = make_model(args)
    optimizer = None
    if own:
        optimizer = CPUAdam(model.parameters(), threads=args.threads, **SETTINGS)
    config = zero_config(args, own=own)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=model.parameters(), config=config
    )[0]


def contenders(args: argparse.Namespace) -> dict[str, Contender]:
    """Stock first: it is made before anything of this package is in use."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from cxl_offload.integrations.deepspeed import placing

    def tokens() -> Iterator[torch.Tensor]:
        return batches(args.vocabulary, args.micro_batch, args.length)

    made = {STOCK: Contender(engine_of(args, own=False), tokens(), window_of(args))}
    with placing(args.placement):
        engine = engine_of(args, own=False)
    made["placement"] = Contender(engine, tokens(), window_of(args))
    with placing(args.placement) as placed:
        engine = engine_of(args, own=True)
    print(placed.table())
    made[OURS] = Contender(engine, tokens(), window_of(args))

    def tell(begins: bool) -> Callable[..., None]:
        def hook(owner: torch.optim.Optimizer, *_: Any) -> None:
            for contender in made.values():
                contender.watch(owner, begins=begins)

        return hook

    register_optimizer_step_pre_hook(tell(True))
    register_optimizer_step_post_hook(tell(False))
    return made


def check_losses(found: dict[str, Contender], steps: int) -> None:
    """The next steps of all, who have had as many before; they also warm up."""
    for contender in found.values():
        for _ in range(steps):
            contender()
    losses = {name: contender.losses[-steps:] for name, contender in found.items()}
    stock = losses[STOCK]
    if losses["placement"] != stock:
        raise SystemExit(f"losses differ: {losses['placement']}, stock {stock}")
    for one, other in zip(losses[OURS], stock, strict=True):
        if abs(one - other) > 0.01 * abs(other):
            raise SystemExit(f"CPUAdam's loss {one} is off from stock's {other}")
    print(f"losses of {steps} steps: bit-identical with placement, within 1 % with CPUAdam")


def window_of(args: argparse.Namespace) -> Window:
    return Window(args.clock, args.threads)
