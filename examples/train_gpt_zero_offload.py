"""Trains a small OPT on the source of Python's standard library, its optimizer in memory tiers.

With DeepSpeed it is ZeRO-Offload, stage 1, 2 or 3, whose host tensors are placed by kind; without,
plain torch on the CPU with ``offload_optimizer``. What comes out is a Hugging Face checkpoint that
FlexGen serves with its weights and KV cache in tiers, and the loss curve.

    python examples/train_gpt_zero_offload.py --output out/gpt --stage 2 --steps 300
    torchrun --nproc-per-node 2 examples/train_gpt_zero_offload.py --stage 3 --offload-param
    cxl-offload flexgen --model out/gpt/model --prompts prompts.txt --gen-len 64
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import needs_transformers  # noqa: F401
import torch
import torch.distributed as dist
from gpt_text import library_tokens, make_tokenizer, windows
from gpt_trainers import (
    OPTIMIZERS,
    PARAMETERS,
    STATES,
    PlainTrainer,
    Trainer,
    Weights,
    ZeroTrainer,
    model_config,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import OPTForCausalLM

import cxl_offload
from cxl_offload.ops.activations import ActivationUse, OffloadedActivations
from cxl_offload.ranks import share_machine
from cxl_offload.topology import load_machine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("out/gpt"), help="folder to write")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO")
    parser.add_argument("--offload-param", action="store_true", help="stage 3: parameters too")
    parser.add_argument("--plain", action="store_true", help="without DeepSpeed, on the CPU")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences at once")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--placement", help="a plan's file, KIND=POLICY;..., or one policy")
    parser.add_argument(
        "--states", choices=tuple(STATES), help="what the optimizer's states are in"
    )
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="of --plain")
    parser.add_argument(
        "--parameters",
        choices=tuple(PARAMETERS),
        default="fp32",
        help="of --plain; bf16 has no master weights",
    )
    parser.add_argument("--activations", metavar="TIER", help="saved activations go there")
    parser.add_argument("--machine", help="a machine file or shipped name, simulated")
    parser.add_argument("--bytes", type=int, default=8 << 20, help="of text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, least in (("optimizer", "adam"), ("parameters", "fp32")):
        if getattr(args, name) != least and not args.plain:
            parser.error(f"--{name} {getattr(args, name)}: only with --plain; add it")
    return args


def start_process_group() -> None:
    """DeepSpeed's own, also without a launcher."""
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed(verbose=False)


def train(args: argparse.Namespace, trainer: Trainer, console: Console) -> dict[str, Any]:
    """Losses of the steps, and the validation's before, between and after."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    training, held_out = library_tokens(args.bytes)
    shape = {"rows": args.micro_batch, "length": args.length}
    batches = windows(training, **shape, seed=args.seed * size + rank)
    losses: list[float] = []
    checked: dict[int, float] = {}

    def check() -> None:
        fixed = windows(held_out, **shape, seed=1)
        with torch.no_grad():
            found = [trainer.loss(next(fixed)).item() for _ in range(4)]
        checked[len(losses)] = sum(found) / len(found)

    every = max(1, args.steps // 5)
    began = time.perf_counter()
    with progress_bar(console, args.steps, shown=rank == 0) as show:
        check()
        for step in range(1, args.steps + 1):
            losses.append(trainer.step([next(batches) for _ in range(args.accumulation)]))
            show(losses[-1])
            if step % every == 0 or step == args.steps:
                check()
    seconds = time.perf_counter() - began
    tokens = args.steps * args.accumulation * args.micro_batch * args.length * size
    return {
        "losses": losses,
        "validation": checked,
        "text_tokens": len(training),
        "processes": size,
        "tokens_per_s": tokens / seconds,
    }


@contextlib.contextmanager
def progress_bar(console: Console, steps: int, *, shown: bool) -> Iterator[Callable[[float], None]]:
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss)


def activations_row(use: ActivationUse, tier: str) -> str:
    """What autograd saved there, and how many small tensors and others stayed."""
    return (
        f"activations: {use.copies} copies, {use.copied_bytes} bytes to {tier}; "
        f"{sum(use.kept.values())} saved tensors stayed where they were"
    )


def draw(result: dict[str, Any], path: Path) -> bool:
    """The loss curve; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(result["losses"]) + 1), result["losses"], lw=0.8, label="training")
    axes.plot(*zip(*result["validation"].items(), strict=True), "o-", label="validation")
    axes.axhline(math.log(256), ls=":", color="grey", label="guessing bytes")
    axes.set(xlabel="step", ylabel="loss, nats a byte", title="OPT on Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def save_model(args: argparse.Namespace, weights: Weights, folder: Path) -> None:
    """config.json, safetensors in half precision, and the tokenizer."""
    config = model_config(args)
    model = OPTForCausalLM(config).half()
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def main() -> None:
    args = parse()
    console = Console(markup=False, highlight=False)
    torch.manual_seed(args.seed)
    zero = not args.plain and importlib.util.find_spec("deepspeed") is not None
    if zero:
        start_process_group()
    elif not args.plain:
        console.print("DeepSpeed is not installed: plain torch with offload_optimizer, on the CPU")
    share = share_machine(None if args.machine is None else load_machine(args.machine))
    saving: AbstractContextManager[Any] = contextlib.nullcontext()
    with cxl_offload.use(share.session()):
        try:
            if args.activations:
                saving = cxl_offload.offload_activations(args.activations)
            trainer: Trainer = (ZeroTrainer if zero else PlainTrainer)(args, saving)
        except ValueError as error:  # such as a tier that this machine has not
            raise SystemExit(f"error: {error}") from None
        result = train(args, trainer, console)
        weights, placed = trainer.weights(), trainer.placed()
        if isinstance(saving, OffloadedActivations):
            placed += f"\n{activations_row(saving.use, args.activations)}"
    if share.rank == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        save_model(args, weights, args.output / "model")
        (args.output / "losses.json").write_text(json.dumps(result, indent=1) + "\n")
        drawn = draw(result, args.output / "loss.png")
        if args.machine:
            console.print(f"on the simulated nodes of {args.machine}:")
        console.print(placed)
        first, last = result["losses"][0], result["losses"][-1]
        console.print(
            f"loss {first:.3f} -> {last:.3f}, validation {result['validation'][args.steps]:.3f}; "
            f"{result['tokens_per_s']:.0f} tokens/s (measured here); {share}"
        )
        console.print(f"{args.output}: model, losses.json{', loss.png' if drawn else ''}")
        if not drawn:
            console.print("no picture: matplotlib is not installed")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
