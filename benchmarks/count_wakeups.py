"""How many threads sleep and wake in a step: FlexGen's and Adam's parallel regions, counted.

    python -m benchmarks.count_wakeups [--only flexgen adam] [--threads N] [--json FILE]

A decode step of the cases of bench_flexgen.py, by stock FlexGen and by this package, and a step of
the contenders of bench_adam.py on one parameter and on many. Counts are *measured*
(wakeups.py says how); time is not, so the machine may do other work. Threads may be more than CPUs.
The program starts itself again in an environment in which OpenMP's threads sleep at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench_adam, bench_flexgen
from benchmarks.markdown_tables import markdown_table
from benchmarks.measurements import describe_machine, write_json
from benchmarks.stock_process import StockProcess
from benchmarks.wakeups import PASSIVE, Wakeups, added, is_passive, per_step, sleeps, wakeups_of
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, make_opt
from cxl_offload.integrations.flexgen.checkpoint import convert_checkpoint
from cxl_offload.integrations.flexgen.model import config_of_checkpoint
from cxl_offload.ops.threads import threads_by_default

LENGTHS = (4, 20)
"""Tokens, or steps, of the two runs whose difference is counted."""
WARM = 3
"""Runs in which the ways of linear layers are chosen, before one is counted."""
HEAD = ("step", "by", "parallel regions", "wake-ups")


@dataclass(frozen=True)
class Row:
    """Of the table."""

    step: str
    by: str
    counted: Wakeups


# FlexGen ------------------------------------------------------------------------------------------


def flexgen_rows(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A decode step of every case, by stock and by this package."""
    shape = replace(bench_flexgen.SHAPE, layers=args.layers)
    model = make_opt(folder / "opt", shape, seed=1)
    convert_checkpoint(model, config_of_checkpoint(model), folder / f"{model.name}-np")
    options = argparse.Namespace(**vars(args), grid=False, gen_len=LENGTHS[1] + 1)
    requests = bench_flexgen.requests(model, options)
    runs = {
        f"{name}, {length} tokens": replace(request, gen_len=length)
        for name, request in requests.items()
        for length in LENGTHS
    }
    stock = StockProcess(bench_flexgen.stock_jobs(model, runs, threads=args.threads), folder)
    session = Session.linux()
    try:
        for name, request in requests.items():
            step = f"a token, {name}"
            yield Row(step, "stock FlexGen", stock_wakeups(stock, name, args.threads))
            yield Row(step, "this package", our_wakeups(request, session, args.threads))
    finally:
        stock.close()


def stock_wakeups(stock: StockProcess, case: str, threads: int) -> Wakeups:
    """Of runs of two lengths in the process of stock FlexGen."""
    counted = []
    for length in LENGTHS:
        name = f"{case}, {length} tokens"
        stock.run(name)
        before = sleeps(stock.pid)
        stock.run(name)
        counted.append(added(before, sleeps(stock.pid)))
    steps = LENGTHS[1] - LENGTHS[0]
    return per_step(*counted, steps=steps, main=stock.pid, threads=threads)


def our_wakeups(request: FlexGenRun, session: Session, threads: int) -> Wakeups:
    """Of one run, looked at twice: a model of another length would choose its ways anew."""
    pid = os.getpid()
    seen: dict[int, dict[int, int]] = {}

    def look(token: int) -> None:
        if token in LENGTHS:
            seen[token] = sleeps(pid)

    with LoadedModel(request, session=session) as loaded, threads_by_default(threads):
        for _ in range(WARM):
            loaded.generate()
        loaded.generate(token_begins=look)
    steps = LENGTHS[1] - LENGTHS[0]
    return per_step(*(seen[at] for at in LENGTHS), steps=steps, main=pid, threads=threads)


# Adam ---------------------------------------------------------------------------------------------


def adam_rows(args: argparse.Namespace) -> Iterator[Row]:
    """A step of every contender, on one parameter and on as many as asked for."""
    case = bench_adam.CASES["fp32"]
    for count in sorted({1, args.params}):
        step = f"Adam, {count} parameter{'s' if count > 1 else ''}"
        for name, (make, huge) in bench_adam.contenders(case).items():
            if huge:
                continue  # pages change nothing here
            first, *others = (
                bench_adam.tensors(args.numel // count, case, huge=False) for _ in range(count)
            )
            optimizer = make(first, case, args.threads)
            params: list[torch.nn.Parameter] = optimizer.param_groups[0]["params"]
            params += [bench_adam.leaf(each) for each in others]
            counted = wakeups_of(optimizer.step, threads=args.threads, lengths=LENGTHS)
            yield Row(step, name.removesuffix(", torch memory"), counted)


# The report ---------------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    numbers = (row.counted.regions, row.counted.wakeups)
    return [row.step, row.by, *(f"{number:.1f}" for number in numbers)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=("flexgen", "adam"), default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=bench_flexgen.ROWS)
    parser.add_argument("--prompt-len", type=int, default=bench_flexgen.PROMPT_LEN)
    parser.add_argument("--layers", type=int, default=bench_flexgen.SHAPE.layers)
    parser.add_argument("--cpu-linear", choices=("fastest", "single", "half"), default="fastest")
    ways = list(bench_flexgen.WAYS)
    parser.add_argument("--cases", nargs="+", choices=list(bench_flexgen.CASES), default=ways)
    parser.add_argument("--numel", type=bench_adam.whole_lines, default=8_000_000)
    parser.add_argument("--params", type=int, default=100, help="that share --numel elements")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.threads < 2:
        parser.error(f"--threads {args.threads}: one thread has no barriers; give at least 2")
    return args


def counted_rows(args: argparse.Namespace) -> Iterator[Row]:
    wanted = args.only or ("flexgen", "adam")
    if "flexgen" in wanted:
        with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as folder:
            yield from flexgen_rows(args, Path(folder))
    if "adam" in wanted:
        yield from adam_rows(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, prints the table and writes the JSON."""
    args = parse(argv)
    if not is_passive():
        # Read when the OpenMP library is loaded, which has happened: begin again.
        os.environ.update(PASSIVE)
        words = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.count_wakeups", *words])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(args.threads)
    rows = []
    for row in counted_rows(args):
        rows.append(row)
        print(f"  measured: {row}", file=sys.stderr, flush=True)
    print(markdown_table(HEAD, [cells(row) for row in rows]), end="")
    if args.json is not None:
        settings: dict[str, Any] = {
            key: value for key, value in vars(args).items() if key != "json"
        }
        document = {**describe_machine(), "kind": "measured", "settings": settings}
        write_json(args.json, {**document, "results": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
