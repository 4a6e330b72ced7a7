"""Regret of plans: what the planner chose against every configuration of a grid.

Simulated: for 40 pairs of model and lengths on published machines, the plan for transformers and a
grid of layouts, batches and shares of every tier, all replayed by the simulator, which knows none
of the planner's equations. A regret of 0.05 says that the best of grid and plan is 5 % faster than
the plan.

Measured (`--measured`, alone): small models on the CPUs of this machine with limited memory, the
plan against a grid, by transformers and FlexGen (measured_regret.py). What else runs on the machine
decides about the result; run it alone. `--minutes` is what it may take; points that are far from
the fastest run once. `--clock cpu` (with OMP_NUM_THREADS=1) counts the processor's time of this
process instead of the wall's: an indication, where others use the cores too.

    python -m benchmarks.bench_plan [--pairs N] [--points N] [--json FILE]
    python -m benchmarks.bench_plan --measured [--quick] [--minutes M] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurements import describe_machine, write_json
from cxl_offload.plan.decoding.trace import cpu_engines, planned_trace
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.planned_machine import as_planned, at_decoding_rates
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.transformers.homes import Homes, block_of, gpu_bytes, homes_of
from cxl_offload.plan.transformers.job import DecoderJob, decoder_job
from cxl_offload.plan.transformers.layout import layouts, most_batches, states_on_host
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.plan.transformers.shares import IDLE, KV, ON_CPU, STREAMED, Shares
from cxl_offload.topology import Machine, load_machine

MODELS = ("opt-13b", "opt-30b", "opt-66b", "llama-3-8b", "llama-65b", "llama-3-70b",
          "mistral-7b", "mixtral-8x7b", "qwen2-7b", "llama-2-7b")  # fmt: skip
LENGTHS = ((128, 32), (512, 32), (1024, 128), (256, 256))
MACHINES = ("epyc9354-cxl-a", "xeon8470-cxl-b", "spr3-h100", "zen4-1")
AIM = 0.05


def simulated_rate(job: DecoderJob, hardware: Hardware, machine: Machine, homes: Homes) -> float:
    """Tokens/s of a block by the simulator."""
    trace = planned_trace(job, hardware, block_of(job, hardware, homes))
    engines = cpu_engines(machine, job.engine)
    found = simulated_seconds(trace, at_decoding_rates(as_planned(machine, hardware)), engines)
    seconds = found["prefill"] + (job.generated - 1) * found["decode"]
    return homes.rows * homes.batches * job.generated / seconds


def spreads(hardware: Hardware) -> list[tuple[float, ...]]:
    """Every node alone, all by bandwidth, all by room, all alike."""
    count = len(hardware.nodes)
    rates = [node.read_bytes_per_s for node in hardware.nodes]
    rooms = [node.usable_bytes for node in hardware.nodes]
    made = [tuple(float(at == one) for at in range(count)) for one in range(count)]
    for weights in (rates, rooms, [1.0] * count):
        made.append(tuple(weight / sum(weights) for weight in weights))
    return made


def grid(job: DecoderJob, hardware: Hardware, points: int, seed: int) -> list[Homes]:
    """So many configurations that fit, drawn from the grid."""
    draw, every, found = random.Random(seed), list(layouts(job, hardware)), []
    every += states_on_host(every)
    patterns = spreads(hardware)
    for _ in range(20 * points):
        layout = draw.choice(every)
        most = most_batches(job, hardware, layout)
        if most < layout.fewest_batches:
            continue
        classes = {STREAMED: layout.streamed, ON_CPU: layout.on_cpu, IDLE: layout.idle}
        names = [name for name, kinds in classes.items() if kinds]
        names += [] if layout.kv == "gpu" else [KV]
        names += [STATES] if layout.states == "host" else []
        shares = {name: draw.choice(patterns) for name in names}
        count = max(layout.fewest_batches, round(most * draw.choice((0.25, 0.5, 0.75, 0.9, 1.0))))
        resident = draw.choice((0.0, 0.25, 0.5)) if layout.streamed else 0.0
        there = {"gpu": 1.0, "both": draw.choice((0.1, 0.25, 0.5)), "host": 0.0}[layout.kv]
        homes = homes_of(job, hardware, layout, Shares(shares, resident, there, float(count), 0.0))
        room = hardware.gpu_usable_bytes
        if homes is not None and (not hardware.has_gpu or gpu_bytes(job, homes) <= room):
            found.append(homes)
        if len(found) == points:
            break
    return found


def simulated(pairs: int, points: int) -> list[dict[str, Any]]:
    """A row for every pair of model and lengths that fits its machine."""
    rows: list[dict[str, Any]] = []
    each = list(itertools.product(LENGTHS, MODELS))
    for at, ((prompt, generated), model) in enumerate(each):
        machine = load_machine(MACHINES[at % len(MACHINES)])
        request = TransformersRequest(
            model=load_model(model),
            machine=machine,
            prompt=prompt,
            generated=generated,
            model_name=model,
            replay=None,
        )
        executor = Transformers(request)
        hardware = executor.hardware()
        found: Candidate[Any] | None = executor.search(hardware)
        if found is None:
            continue
        job = decoder_job(request.model, prompt=prompt, generated=generated)
        planned = simulated_rate(job, hardware, machine, found.choice.homes)
        rates = [
            simulated_rate(job, hardware, machine, homes)
            for homes in grid(job, hardware, points, at)
        ]
        best = max([planned, *rates])
        rows.append(
            {
                "model": model,
                "machine": machine.name,
                "prompt": prompt,
                "generated": generated,
                "planned_tokens_per_s": planned,
                "best_tokens_per_s": best,
                "regret": best / planned - 1,
                "points": len(rates),
            }
        )
        if len(rows) == pairs:
            break
    return rows


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every case of both engines, a like share of the minutes for each."""
    import torch

    from benchmarks.measured_regret import Setting, regret_of
    from benchmarks.regret_flexgen import flexgen_cases
    from benchmarks.regret_transformers import transformers_cases
    from cxl_offload.memory.heap import keep_freed_memory
    from cxl_offload.profile.operators.measure import measure_operators
    from cxl_offload.topology import discover

    deadline = time.monotonic() + 60 * options.minutes
    keep_freed_memory()
    torch.manual_seed(0)
    rows = []
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        now = time.process_time if options.clock == "cpu" else time.perf_counter
        operators = measure_operators(seconds=1.0 if options.quick else 4.0, clock=now)
        setting = Setting(discover(), operators, Path(scratch), options.quick, now)
        cases = [*transformers_cases(setting), *flexgen_cases(setting)]
        for at, case in enumerate(cases):
            left = (deadline - time.monotonic()) / (len(cases) - at)
            rows.append(regret_of(case, options.rounds, left))
            shown = rows[-1]
            print(f"{shown['case']}: {shown['regret']:.1%} over {shown['points']}", flush=True)
    return rows


def report(title: str, rows: list[dict[str, Any]]) -> None:
    """A table and the regret in short."""
    shown = [name for name, value in rows[0].items() if not isinstance(value, dict)]
    table = Table(*shown, title=title)
    for row in rows:
        each = (row[name] for name in shown)
        cells = (f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in each)
        table.add_row(*cells)
    console = Console()
    console.print(table)
    regrets = [row["regret"] for row in rows]
    within = sum(regret <= AIM for regret in regrets) / len(regrets)
    console.print(
        f"{title}: median regret {statistics.median(regrets):.1%}, worst {max(regrets):.1%}, "
        f"within {AIM:.0%} in {within:.0%} of {len(regrets)} cases"
    )


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=40, help="Pairs of model and lengths.")
    parser.add_argument("--points", type=int, default=150, help="Configurations of a pair's grid.")
    parser.add_argument("--measured", action="store_true", help="Run on this machine instead.")
    parser.add_argument("--quick", action="store_true", help="Few measured cases, small models.")
    parser.add_argument("--minutes", type=float, help="What --measured may take.")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rounds", type=int, help="Repeats of every measurement.")
    parser.add_argument("--json", metavar="FILE", help="Write the rows there.")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 3)
    options.minutes = options.minutes or (1.5 if options.quick else 22.0)
    result: dict[str, Any] = describe_machine()
    name = "measured" if options.measured else "simulated"
    rows = measured(options) if options.measured else simulated(options.pairs, options.points)
    result[name] = rows
    report(name, rows)
    if options.json:
        write_json(Path(options.json), result)


if __name__ == "__main__":
    main()
