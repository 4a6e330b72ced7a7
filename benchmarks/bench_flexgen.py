"""FlexGen's tokens/s: as it is, and with its host memory allocated and copied by this package.

Both run the same model, prompts and policies on the CPUs of this machine, which stand in for a GPU
on both sides, with as many threads. Runs alternate, so that what else the machine does hits both;
tokens are compared before anything is timed. Attention in place rounds less often than FlexGen's,
and linear layers in single precision not alike, so a few tokens may differ and how many are equal
is told (`--cpu-linear half` multiplies as FlexGen does). Every figure is measured.

Cases with more than 2,048 tokens of prompts fill their KV cache with seeded numbers instead of
computing it (skipped_prompt.py): only their decoding is timed.

    python -m benchmarks.bench_flexgen [--grid] [--rounds N] [--json FILE]

`--grid` runs the four ways at 1, 4, 8 and 32 rows of 32, 128 and 512 tokens instead: the first bar
is 0.98 of stock in every case. It takes about an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import Ratio, describe_machine, paired_ratio, write_json
from benchmarks.skipped_prompt import skipped_prompt
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.checkpoint import convert_checkpoint
from cxl_offload.integrations.flexgen.model import config_of_checkpoint
from cxl_offload.integrations.flexgen.wiring import flexgen_policy

ROOT = Path(__file__).resolve().parents[1]
STOCK = "benchmarks.stock_flexgen"
SHAPE = OptShape(layers=12, hidden=768, heads=12)
"""Width and depth of OPT-125M, with byte-level tokens."""

MOST_COMPUTED = 2048
"""Tokens of prompts; with more, only decoding is timed."""

LEAST_EQUAL = 0.95
"""Of tokens that are rounded differently; random weights make near ties likely."""

FEW_ROWS = 4
LEAST_EQUAL_FEW = 0.5
"""Random tokens would be equal in one of two hundred."""

LEAST_EQUAL_PACKED = 0.75
"""Where a last bit of a new key can change its 4-bit code, too, which is then attended to."""

Case = dict[str, Any]
"""Fields of a FlexGenRun, and ``rows`` and ``prompt_len`` where they are the case's own."""

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
    "make demo's own: a fifth of the weights on the accelerator, 2 batches": {
        **WAYS["attention on the CPU, 2 batches"],
        "percent": (20, 80, 0, 100, 0, 100),
    },
}
GRID: dict[str, Case] = {
    f"{way}, {rows} x {length}": {**case, "rows": rows, "prompt_len": length}
    for rows in (1, 4, 8, 32)
    for length in (32, 128, 512)
    for way, case in WAYS.items()
}


class StockProcess:
    """Stock FlexGen in a process of its own, which runs one case at a time."""

    def __init__(self, jobs: dict[str, Any], folder: Path) -> None:
        (folder / "jobs.json").write_text(json.dumps(jobs))
        self._errors = (folder / "stock.err").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", STOCK, folder / "jobs.json"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, case: str) -> dict[str, Any]:
        """Tokens and seconds of one case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["nothing on stderr"])[-1]
            raise RuntimeError(f"stock FlexGen ended with {status} in {case!r}: {last}")
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def policy_fields(request: FlexGenRun) -> list[Any]:
    """FlexGen's Policy of a request, in the order in which the stock process takes it."""
    fields = asdict(flexgen_policy(request, request.percent))
    kept = [value for name, value in fields.items() if not name.startswith("com")]
    return [*kept, request.compress_weight, request.compress_cache]


def requests(model: Path, options: argparse.Namespace) -> dict[str, FlexGenRun]:
    """The request of every case, on the same prompts if it names none of its own."""
    made = {}
    for name, case in (GRID if options.grid else CASES).items():
        fields = dict(case)
        count = fields.pop("rows", options.rows)
        length = fields.pop("prompt_len", options.prompt_len)
        batches = fields.get("num_gpu_batches", 1)
        if count < batches:
            continue
        random = np.random.default_rng(0)
        tokens = random.integers(16, SHAPE.vocab, size=(count, length)).tolist()
        made[name] = FlexGenRun(
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


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All cases, each on both sides in turn."""
    model = make_opt(folder / "opt", SHAPE, seed=1)
    config = config_of_checkpoint(model)
    convert_checkpoint(model, config, folder / f"{model.name}-np")
    cases = {
        name: request
        for name, request in requests(model, options).items()
        if options.grid or name in options.cases
    }
    jobs = {
        "weights": str(folder),
        "config": {key: value for key, value in asdict(config).items() if key != "dtype"},
        "offload_dir": str(folder / "offload"),
        "threads": torch.get_num_threads(),
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
    stock = StockProcess(jobs, folder)
    session = Session.linux()
    try:
        return [
            one_case(name, request, stock, session, options.rounds)
            for name, request in cases.items()
        ]
    finally:
        stock.close()


def one_case(
    name: str, request: FlexGenRun, stock: StockProcess, session: Session, rounds: int
) -> dict[str, Any]:
    """Medians and ratios of one case; the first run of both sides warms up and is compared."""
    times: dict[str, list[tuple[float, float]]] = {"stock": [], "cxl_offload": []}
    with LoadedModel(request, session=session) as loaded, shortcut(request):
        expected, ours = stock.run(name), loaded.generate()
        equal = equal_share(np.array(expected["tokens"]), ours.tokens, ours.prompt_len)
        if equal < least_equal(request):
            raise RuntimeError(f"{name}: only {equal:.0%} of the tokens are those of stock FlexGen")
        for _ in range(rounds):
            costs = stock.run(name)["seconds"]
            times["stock"].append((costs[0], sum(costs[1:])))
            report = loaded.generate()
            times["cxl_offload"].append((report.prefill_seconds, report.decode_seconds))
    tokens = {
        "prefill": request.rows * ours.prompt_len,
        "decode": request.rows * (ours.gen_len - 1),
    }
    result: dict[str, Any] = {
        "case": name,
        "kind": "measured",
        "rounds": rounds,
        "equal_tokens": equal,
    }
    for at, phase in enumerate(tokens):
        if phase == "prefill" and only_decodes(request):
            continue
        both = {side: [tokens[phase] / one[at] for one in runs] for side, runs in times.items()}
        ratio = paired_ratio(both["cxl_offload"], both["stock"])
        result[phase] = {
            "stock_tokens_per_s": float(np.median(both["stock"])),
            "cxl_offload_tokens_per_s": float(np.median(both["cxl_offload"])),
            "ratio": asdict(ratio),
        }
    return result


def equal_share(expected: Any, ours: Any, prompt_len: int) -> float:
    """Share of new tokens that are equal, up to and with the first that differs in each row: what
    follows one that differs answers another text."""
    same = expected[:, prompt_len:] == ours[:, prompt_len:]
    before = np.cumprod(same, axis=1).sum(axis=1)
    compared = np.minimum(before + 1, same.shape[1]).sum()
    return float(before.sum() / compared)


def show(console: Console, results: list[dict[str, Any]]) -> None:
    """The table."""
    made = Table("case", "phase", title="FlexGen tokens/s (measured, host in place of a GPU)")
    for heading in ("stock", "this package", "ratio", "95 % interval", "tokens equal"):
        made.add_column(heading, justify="right")
    for result in results:
        phases = [phase for phase in ("prefill", "decode") if phase in result]
        for phase in phases:
            one, ratio = result[phase], Ratio(**result[phase]["ratio"])
            made.add_row(
                result["case"] if phase == phases[0] else "",
                phase,
                f"{one['stock_tokens_per_s']:.1f}",
                f"{one['cxl_offload_tokens_per_s']:.1f}",
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f} to {ratio.high:.2f}",
                f"{result['equal_tokens']:.1%}" if phase == "decode" else "",
            )
    console.print(made)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", action="store_true", help="rows and lengths instead of the cases")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--cpu-linear", choices=("fastest", "single", "half"), default="fastest")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        results = measure(options, Path(scratch))
    show(Console(), results)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        document = {**describe_machine(), "settings": settings, "results": results}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
