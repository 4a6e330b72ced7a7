"""ZeRO-Offload with and without this package: the CPU optimizer, ``engine.step()``, a whole step.

    python -m benchmarks.bench_zero_offload [--rounds 15] [--grid] [--neighbour] [--json FILE]

Trains the same small OPT (bf16, micro-batch 4 x 256, on the CPU in the GPU's place) in engines that
live side by side in one process and take turns, in a rotating order: DeepSpeed as it is with
DeepSpeedCPUAdam, the same with this package's placement, and with its placement and CPUAdam. First
their losses are compared: bit by bit where the optimizer is DeepSpeed's, to 1 % with this
package's kernel. The physical bound takes its turn too: the optimizer's own bytes (28 a parameter)
read and written once without arithmetic, in huge pages.

`--dtype float32` trains in float32: processors without arithmetic for bfloat16 take several times
as long for forward and backward, which both sides leave to torch.

Reported are medians and, over rounds, ratios to stock with 95 % bootstrap intervals. The optimizer
is what runs inside of ``optimizer.step()``; ``engine.step()`` adds clipping, unscaling and the copy
to bf16, the whole step forward and backward. At the end stand the bars (bars.py), which the lower
ends of the intervals have to reach. A sample is taken again when something else ran on the CPUs
during its optimizer. ``--clock cpu`` compares CPU seconds a thread where a machine is never quiet:
an indication, not the bar's.

`--grid` trains on micro-batches of 1, 4, 8 and 32 sequences of 32, 128 and 512 tokens instead, with
the same engines and without the bound: the bar of every size is on the whole step. Losses are
compared at every size, so no sample is taken again there.

`--neighbour` takes every sample also beside a process that keeps a CPU and the memory busy
(neighbour.py), in every round once, and tells how much stock loses by it, and how much this
package.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import grid
from benchmarks.bars import bars_of, print_bars
from benchmarks.conditions import Conditions, add_options, conditions_of
from benchmarks.measurements import check_plot, describe_machine, paired_ratio, write_json
from benchmarks.neighbour import BESIDE, QUIET, Falls, falls_of, falls_table
from benchmarks.zero_contenders import (
    Bound,
    Contender,
    batches,
    check_losses,
    contenders,
    make_model,
    window_of,
)
from benchmarks.zero_report import PARTS, STOCK, Sample, plot, show, show_grid
from cxl_offload import _C

Runs = dict[str, Contender | Bound]
Samples = dict[str, list[Sample]]
Seconds = dict[str, dict[str, list[float]]]
"""By contender and part of a step."""


def measure(
    runs: Runs, args: argparse.Namespace, conditions: Conditions
) -> tuple[dict[str, Samples], int]:
    """Samples by condition, and how many of the quiet ones were not alone."""
    tries = args.tries if args.clock == "wall" else 1
    found: dict[str, Samples] = {
        condition: {name: [] for name in runs} for condition in conditions.names
    }
    loud = 0
    for number in range(args.rounds):
        for condition in conditions.of_round(number):
            alone = condition == QUIET
            for name in in_turn(list(runs), number):
                sample = sample_of(runs[name], tries if alone else 1)
                found[condition][name].append(sample)
                loud += alone and not runs[name].window.quiet
    return found, loud


def in_turn(names: list[str], number: int) -> list[str]:
    """Another begins in every round."""
    turn = number % len(names)
    return names[turn:] + names[:turn]


def sample_of(run: Contender | Bound, tries: int) -> Sample:
    """Taken again where the optimizer was not alone."""
    for _ in range(tries):
        sample = run()
        if run.window.quiet:
            break
    return sample


def seconds_of(samples: Samples) -> Seconds:
    """By contender and part."""
    return {
        name: {part: [sample[part] for sample in taken if part in sample] for part in PARTS}
        for name, taken in samples.items()
    }


def falls(found: dict[str, Seconds]) -> dict[str, Falls]:
    """Of every contender and part, by the seconds of both conditions."""
    return {
        f"{name}: {part}": falls_of(
            *({c: seconds[side][part] for c, seconds in found.items()} for side in (STOCK, name))
        )
        for name in found[QUIET]
        if name not in (STOCK, "bound")
        for part in PARTS
    }


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
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(_C.allowed_cpus()))
    parser.add_argument("--tries", type=int, default=4, help="for a sample without other work")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    add_options(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.grid:
        for name in ("plot", "length", "micro_batch", "tries"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')}: is for one size; leave out --grid")
        # Losses of all sizes are compared, so every contender has to make as many steps.
        args.length, args.tries = max(grid.LENGTHS), 1
    return args


def ratios(table: Seconds) -> dict[str, dict[str, Any]]:
    """What each is beside stock."""
    return {
        name: {
            part: asdict(paired_ratio(table[STOCK][part], values))
            for part, values in parts.items()
            if values and name != "bound"
        }
        for name, parts in table.items()
    }


def prepare(args: argparse.Namespace) -> None:
    """DeepSpeed in this one process, on the CPU."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29533", "DS_ACCELERATOR": "cpu"}.items():
        os.environ.setdefault(name, value)
    try:
        import deepspeed
    except ImportError:
        raise SystemExit("DeepSpeed is not installed: there is nothing to compare with") from None
    torch.set_num_threads(args.threads)
    deepspeed.init_distributed("gloo", verbose=False)


def run(args: argparse.Namespace, conditions: Conditions) -> dict[str, Any]:
    """The document."""
    found = contenders(args)
    numel = sum(param.numel() for param in make_model(args).parameters())
    document = {"kind": "measured", "clock": args.clock, "parameters": numel}
    if args.grid:
        return run_grid(document, found, args, conditions)
    check_losses(found, 3)
    runs: Runs = {"bound": Bound(numel, args.threads, window_of(args)), **found}
    taken, lost = one_size(runs, args, conditions)
    show(taken["s"], numel, clock=args.clock, loud=taken["loud"])
    return with_falls(document | taken, lost, conditions)


def run_grid(
    document: dict[str, Any],
    found: dict[str, Contender],
    args: argparse.Namespace,
    conditions: Conditions,
) -> dict[str, Any]:
    """The same engines train on every size in turn; losses are compared in each."""
    cells: dict[str, Any] = {}
    lost: dict[str, Falls] = {}
    for cell, (rows, length) in grid.CELLS.items():
        for contender in found.values():
            contender.batches = batches(args.vocabulary, rows, length)
        check_losses(found, 2)
        cells[cell], falls_there = one_size(dict(found), args, conditions)
        lost |= {f"{cell}, {name}": each for name, each in falls_there.items()}
    show_grid({cell: each["s"] for cell, each in cells.items()}, clock=args.clock)
    return with_falls(document | {"grid": cells}, lost, conditions)


def one_size(
    runs: Runs, args: argparse.Namespace, conditions: Conditions
) -> tuple[dict[str, Any], dict[str, Falls]]:
    """Samples and ratios of all contenders on batches of one size, and their falls."""
    samples, loud = measure(runs, args, conditions)
    seconds = {condition: seconds_of(each) for condition, each in samples.items()}
    found = {"loud": loud, "speedup": ratios(seconds[QUIET]), "s": seconds[QUIET]}
    if BESIDE not in seconds:
        return found, {}
    return found | {"s_beside": seconds[BESIDE]}, falls(seconds)


def with_falls(
    document: dict[str, Any], lost: dict[str, Falls], conditions: Conditions
) -> dict[str, Any]:
    """The document with what a neighbour costs, which is printed; as it is where there was none."""
    if lost:
        print(falls_table(lost))
    return document | conditions.document(lambda: lost)


def main() -> int:
    args = parse()
    check_plot(args.plot)
    if args.clock == "cpu" and os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(
            sys.executable, [sys.executable, "-m", "benchmarks.bench_zero_offload", *sys.argv[1:]]
        )
    prepare(args)
    with conditions_of(args) as conditions:
        document = run(args, conditions)
    good = print_bars([*bars_of("zero_offload", document)])
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        write_json(args.json, {**document, **describe_machine(), "options": options})
    if args.plot:
        table = document["s"]
        plot(
            args.plot,
            {n: {p: float(np.median(v)) for p, v in t.items() if v} for n, t in table.items()},
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
