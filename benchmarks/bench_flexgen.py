"""FlexGen's tokens/s: as it is, and with its host memory allocated and copied by this package.

Both run the same model, prompts and policies on the CPUs of this machine, which stand in for a GPU
on both sides, with as many threads. Runs alternate, so that what else the machine does hits both;
tokens are compared before anything is timed. Attention in place rounds less often than FlexGen's,
and linear layers in single precision not alike, so a few tokens may differ and how many are equal
is told (`--cpu-linear half` multiplies as FlexGen does). Every figure is measured.

Cases with more than 2,048 tokens of prompts fill their KV cache with seeded numbers instead of
computing it (skipped_prompt.py): only their decoding is timed.

    python -m benchmarks.bench_flexgen [--grid] [--neighbour] [--rounds N] [--json FILE]

`--grid` runs the four ways, or those of ``--cases``, at 1, 4, 8 and 32 rows of 32, 128 and 512
tokens instead. It takes about an hour, and less with fewer ``--layers``.
`--neighbour` also measures every case beside a process that keeps a CPU and the memory busy
(neighbour.py), in every round once: it tells how much stock loses by it, and how much this package.
At the end stand the bars (bars.py), which the lower ends of the intervals have to reach; that of
8 rows of 128 tokens is asked only where no other size was.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks import grid
from benchmarks.bars import bars_of, print_bars
from benchmarks.conditions import Conditions, add_options, conditions_of
from benchmarks.flexgen_report import OURS, PHASES, STOCK, Seconds, falls, phase_result, show
from benchmarks.measurements import describe_machine, write_json
from benchmarks.neighbour import falls_table
from benchmarks.skipped_prompt import skipped_prompt
from benchmarks.stock_process import StockProcess
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.checkpoint import convert_checkpoint
from cxl_offload.integrations.flexgen.model import config_of_checkpoint
from cxl_offload.integrations.flexgen.request import CPU_LINEAR
from cxl_offload.integrations.flexgen.wiring import flexgen_policy

SHAPE = OptShape(layers=12, hidden=768, heads=12)
"""Width and depth of OPT-125M, with byte-level tokens."""

MOST_COMPUTED = 2048
"""Tokens of prompts; with more, only decoding is timed."""

LEAST_EQUAL = 0.95
"""Of tokens that are rounded differently; random weights make near ties likely."""

FEW_ROWS = 4
LEAST_EQUAL_FEW = 0.5
"""Random tokens would be equal in one of two hundred. Of one row the first token may be a near tie
that float16 decides otherwise than float32, so such a row is compared again with products as
FlexGen rounds them."""

LEAST_EQUAL_PACKED = 0.75
"""Where a last bit of a new key can change its 4-bit code, too, which is then attended to."""

Case = dict[str, Any]
"""Fields of a FlexGenRun, and ``rows`` and ``prompt_len`` where they are the case's own."""

ROWS, PROMPT_LEN = 8, 128
"""Of cases that name no size."""

Costs = dict[str, dict[str, list[tuple[float, float]]]]
"""Seconds of the prompt and of all later tokens, by condition and side."""

WAYS: dict[str, Case] = {
    "all on the host": {},
    "half of weights and KV on the accelerator": {"percent": (50, 50, 50, 50, 0, 100)},
    "attention on the CPU": {"cpu_cache_compute": True},
    "attention on the CPU, 2 batches": {
        "cpu_cache_compute": True,
        "num_gpu_batches": 2,
        "overlap": False,  # stock FlexGen gives wrong tokens with overlap here
    },
}
LONG: Case = {"cpu_cache_compute": True, "rows": 32, "prompt_len": 512}
CASES: dict[str, Case] = WAYS | {
    "attention on the CPU, 32 x 512 tokens": LONG,
    "attention on the CPU, 4-bit cache, 32 x 512": LONG | {"compress_cache": True},
    "make demo's own: 20 % of the weights asked for on the accelerator, 2 batches": {
        **WAYS["attention on the CPU, 2 batches"],
        "percent": (20, 80, 0, 100, 0, 100),
    },
}
GRID: dict[str, Case] = {
    f"{way}, {cell}": {**case, "rows": rows, "prompt_len": length}
    for cell, (rows, length) in grid.CELLS.items()
    for way, case in WAYS.items()
}


def policy_fields(request: FlexGenRun) -> list[Any]:
    """FlexGen's Policy of a request, in the order in which the stock process takes it."""
    fields = asdict(flexgen_policy(request, request.percent))
    kept = [value for name, value in fields.items() if not name.startswith("com")]
    return [*kept, request.compress_weight, request.compress_cache]


def requests(model: Path, options: argparse.Namespace) -> dict[str, FlexGenRun]:
    """The request of every case, on the same prompts if it names none of its own."""
    made = {}
    asked = {name: CASES[name] for name in options.cases}
    if options.grid:
        asked = {name: case for name, case in GRID.items() if way_of(name) in options.cases}
    for name, case in asked.items():
        fields = dict(case)
        count = fields.pop("rows", options.rows)
        length = fields.pop("prompt_len", options.prompt_len)
        batches = fields.get("num_gpu_batches", 1)
        if count < batches or divides_a_sequence(count // batches, case):
            continue
        random = np.random.default_rng(0)
        tokens = random.integers(16, SHAPE.vocab, size=(count, length)).tolist()
        made[name_of(name, case, count, length)] = FlexGenRun(
            model=str(model),
            token_ids=tuple(tuple(row) for row in tokens),
            gen_len=options.gen_len,
            gpu_batch_size=count // batches,
            record=False,
            accelerator="host",
            cpu_linear=options.cpu_linear,
            **fields,
        )
    return made


def way_of(name: str) -> str:
    """Of a case of the grid."""
    return name.rpartition(", ")[0]


def divides_a_sequence(rows: int, case: Case) -> bool:
    """Whether a share of KV would cut one of so many sequences, which FlexGen places whole."""
    percent = case.get("percent")
    return percent is not None and rows * percent[2] % 100 != 0


def name_of(name: str, case: Case, rows: int, length: int) -> str:
    """With the size, where neither the case nor this benchmark names it."""
    if "rows" in case or (rows, length) == (ROWS, PROMPT_LEN):
        return name
    return f"{name}, {rows} x {length}"


def least_equal(request: FlexGenRun) -> float:
    """Share of the tokens; of few rows a single near tie is a large share."""
    if request.rows < FEW_ROWS:
        return LEAST_EQUAL_FEW
    return LEAST_EQUAL_PACKED if request.compress_cache else LEAST_EQUAL


def only_decodes(request: FlexGenRun) -> bool:
    return sum(map(len, request.token_ids or ())) > MOST_COMPUTED


def shortcut(request: FlexGenRun) -> contextlib.AbstractContextManager[None]:
    """What a case leaves out."""
    return skipped_prompt() if only_decodes(request) else contextlib.nullcontext()


def stock_jobs(model: Path, cases: dict[str, FlexGenRun], *, threads: int) -> dict[str, Any]:
    """What stock FlexGen's process takes; the converted weights lie beside the model."""
    config = asdict(config_of_checkpoint(model))
    return {
        "weights": str(model.parent),
        "config": {key: value for key, value in config.items() if key != "dtype"},
        "offload_dir": str(model.parent / "offload"),
        "threads": threads,
        "cases": {
            name: {
                "inputs": request.token_ids,
                "gen_len": request.gen_len,
                "policy": policy_fields(request),
                "skip_prompt": only_decodes(request),
            }
            for name, request in cases.items()
        },
    }


def measure(
    options: argparse.Namespace, folder: Path, conditions: Conditions
) -> list[dict[str, Any]]:
    """All cases, each on both sides in turn."""
    model = make_opt(folder / "opt", replace(SHAPE, layers=options.layers), seed=1)
    convert_checkpoint(model, config_of_checkpoint(model), folder / f"{model.name}-np")
    cases = requests(model, options)
    stock = StockProcess(stock_jobs(model, cases, threads=torch.get_num_threads()), folder)
    session = Session.linux()
    try:
        return [
            one_case(name, request, stock, session, options.rounds, conditions)
            for name, request in cases.items()
        ]
    finally:
        stock.close()


def one_case(
    name: str,
    request: FlexGenRun,
    stock: StockProcess,
    session: Session,
    rounds: int,
    conditions: Conditions,
) -> dict[str, Any]:
    """Medians and ratios of one case; the first run of both sides warms up and is compared."""
    costs: Costs = {condition: {STOCK: [], OURS: []} for condition in conditions.names}
    with LoadedModel(request, session=session) as loaded, shortcut(request):
        expected, ours = stock.run(name), loaded.generate()
        equal = share_of(expected, ours)
        unsure = equal < least_equal(request)
        if unsure and request.rows >= FEW_ROWS:
            raise unequal(name, equal)
        for number in range(rounds):
            for condition in conditions.of_round(number):
                first, *rest = stock.run(name)["seconds"]
                costs[condition][STOCK].append((first, sum(rest)))
                report = loaded.generate()
                costs[condition][OURS].append((report.prefill_seconds, report.decode_seconds))
    if unsure and not is_near_tie(request, expected, session):
        raise unequal(name, equal)
    tokens = (request.rows * ours.prompt_len, request.rows * (ours.gen_len - 1))
    result: dict[str, Any] = {
        "case": name,
        "kind": "measured",
        "rounds": rounds,
        "equal_tokens": equal,
    }
    for at, phase in enumerate(PHASES):
        if phase == "decode" or not only_decodes(request):
            result[phase] = phase_result(seconds_of(costs, at), tokens[at])
    return result


def unequal(name: str, equal: float) -> RuntimeError:
    """What ends a benchmark whose sides do not compute the same."""
    return RuntimeError(f"{name}: only {equal:.0%} of the tokens are those of stock FlexGen")


def is_near_tie(request: FlexGenRun, expected: dict[str, Any], session: Session) -> bool:
    """Whether few rows have stock's tokens where products are rounded as FlexGen rounds them."""
    alike = replace(request, cpu_linear="half")
    with LoadedModel(alike, session=session) as loaded, shortcut(alike):
        return share_of(expected, loaded.generate()) >= LEAST_EQUAL_FEW


def share_of(expected: dict[str, Any], ours: Any) -> float:
    """Of stock's tokens."""
    return equal_share(np.array(expected["tokens"]), ours.tokens, ours.prompt_len)


def seconds_of(costs: Costs, at: int) -> Seconds:
    """Of one phase."""
    return {
        condition: {side: [one[at] for one in runs] for side, runs in sides.items()}
        for condition, sides in costs.items()
    }


def equal_share(expected: Any, ours: Any, prompt_len: int) -> float:
    """Share of new tokens that are equal, up to and with the first that differs in each row: what
    follows one that differs answers another text."""
    same = expected[:, prompt_len:] == ours[:, prompt_len:]
    before = np.cumprod(same, axis=1).sum(axis=1)
    compared = np.minimum(before + 1, same.shape[1]).sum()
    return float(before.sum() / compared)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, of the command line where no arguments are given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--prompt-len", type=int, default=PROMPT_LEN)
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--cpu-linear", choices=CPU_LINEAR, default="fastest")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    add_options(parser)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the benchmark; 1 where a bar is missed."""
    options = parse()
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    document = {**describe_machine(), "settings": settings}
    with (
        tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch,
        conditions_of(options) as conditions,
    ):
        document["results"] = measure(options, Path(scratch), conditions)
        document |= conditions.document(lambda: falls(document["results"]))
    show(Console(), document["results"])
    if options.neighbour:
        print(falls_table(falls(document["results"])))
    good = print_bars([*bars_of("flexgen", document)])
    if options.json is not None:
        write_json(options.json, document)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
