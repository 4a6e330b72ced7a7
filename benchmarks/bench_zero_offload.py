"""ZeRO-Offload with and without this package: the CPU optimizer, ``engine.step()``, a whole step.

    python -m benchmarks.bench_zero_offload [--rounds 15] [--stage 2] [--json FILE] [--plot FILE]

Trains the same small OPT (bf16, micro-batch 4 x 256, on the CPU in the GPU's place) in engines that
live side by side in one process and take turns, in a rotating order: DeepSpeed as it is with
DeepSpeedCPUAdam, the same with this package's placement, and with its placement and CPUAdam. First
their losses are compared: bit by bit where the optimizer is DeepSpeed's, to 1 % with this
package's kernel. The physical bound takes its turn too: the optimizer's own bytes (28 a parameter)
read and written once without arithmetic, in huge pages.

Reported are medians and, over rounds, ratios to stock with 95 % bootstrap intervals. The optimizer
is what runs inside of ``optimizer.step()``; ``engine.step()`` adds clipping, unscaling and the copy
to bf16, the whole step forward and backward. The bar is on the optimizer, at the interval's lower
end. A sample is taken again when something else ran on the CPUs during its
optimizer. ``--clock cpu`` compares CPU seconds a thread where a machine is never quiet: an
indication, not the bar's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cxl_offload
from benchmarks.measurements import check_plot, describe_machine, paired_ratio, write_json
from benchmarks.quiet_window import Window
from benchmarks.zero_report import PARTS, STOCK, Sample, plot, show
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
        "bf16": {"enabled": True},
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


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    while True:
        shape = (args.micro_batch, args.length)
        yield torch.randint(4, args.vocabulary, shape, generator=source)


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

    made = {STOCK: Contender(engine_of(args, own=False), batches(args), window_of(args))}
    with placing(args.placement):
        engine = engine_of(args, own=False)
    made["placement"] = Contender(engine, batches(args), window_of(args))
    with placing(args.placement) as placed:
        engine = engine_of(args, own=True)
    print(placed.table())
    made["placement, CPUAdam"] = Contender(engine, batches(args), window_of(args))

    def tell(begins: bool) -> Callable[..., None]:
        def hook(owner: torch.optim.Optimizer, *_: Any) -> None:
            for contender in made.values():
                contender.watch(owner, begins=begins)

        return hook

    register_optimizer_step_pre_hook(tell(True))
    register_optimizer_step_post_hook(tell(False))
    return made


def check_losses(found: dict[str, Contender], steps: int) -> None:
    """The first steps of all; they also warm up."""
    for contender in found.values():
        for _ in range(steps):
            contender()
    stock = found[STOCK].losses
    if found["placement"].losses != stock:
        raise SystemExit(f"losses differ: {found['placement'].losses}, stock {stock}")
    for one, other in zip(found["placement, CPUAdam"].losses, stock, strict=True):
        if abs(one - other) > 0.01 * abs(other):
            raise SystemExit(f"CPUAdam's loss {one} is off from stock's {other}")
    print(f"losses of {steps} steps: bit-identical with placement, within 1 % with CPUAdam")


def measure(
    runs: dict[str, Contender | Bound], rounds: int, tries: int
) -> tuple[dict[str, list[Sample]], int]:
    """Samples of every round, taken again where the optimizer was not alone; how many were not."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names, loud = list(runs), 0
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            for _ in range(tries):
                sample = runs[name]()
                if runs[name].window.quiet:
                    break
            samples[name].append(sample)
            loud += not runs[name].window.quiet
    return samples, loud


def window_of(args: argparse.Namespace) -> Window:
    return Window(args.clock, args.threads)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--placement", help="a policy for all kinds; default: the package's")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=12288)
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--tries", type=int, default=4, help="for a sample without other work")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def write(
    args: argparse.Namespace, about: dict[str, Any], table: dict[str, dict[str, list[float]]]
) -> None:
    """All figures as JSON, with what each is beside stock."""
    ratios = {
        name: {
            part: vars(paired_ratio(table[STOCK][part], values))
            for part, values in parts.items()
            if values and name != "bound"
        }
        for name, parts in table.items()
    }
    options = {name: str(value) for name, value in vars(args).items()}
    write_json(
        args.json,
        {**about, **describe_machine(), "options": options, "speedup": ratios, "s": table},
    )


def main() -> int:
    args = parse()
    check_plot(args.plot)
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks.bench_zero_offload", *sys.argv[1:]]
        )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29533", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)
    try:
        import deepspeed
    except ImportError:
        raise SystemExit("DeepSpeed is not installed: there is nothing to compare with") from None
    torch.set_num_threads(args.threads)
    deepspeed.init_distributed("gloo", verbose=False)
    found = contenders(args)
    numel = sum(param.numel() for param in make_model(args).parameters())
    check_losses(found, 3)
    limit = Bound(numel, args.threads, window_of(args))
    runs: dict[str, Contender | Bound] = {"bound": limit, **found}
    samples, loud = measure(runs, args.rounds, args.tries if args.clock == "wall" else 1)
    table = {
        name: {part: [sample[part] for sample in taken if part in sample] for part in PARTS}
        for name, taken in samples.items()
    }
    good = show(table, numel, clock=args.clock, loud=loud)
    if args.json:
        about = {"kind": "measured", "clock": args.clock, "parameters": numel, "loud": loud}
        write(args, about, table)
    if args.plot:
        plot(
            args.plot,
            {n: {p: float(np.median(v)) for p, v in t.items() if v} for n, t in table.items()},
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
