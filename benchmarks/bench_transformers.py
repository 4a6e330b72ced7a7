"""generate() over tensors in tiers, against stock transformers, accelerate and llama.cpp.

    python -m benchmarks.bench_transformers [--rows decode prefill disk llama] [--quick]
        [--batches 1 8 32] [--prompts 32 512] [--kv-heads 32 8] [--layers 16] [--hidden 2048]
        [--inner 5632] [--heads 32] [--prefill-layers 2] [--policy bind:0] [--linear-rows fastest]
        [--threads 2] [--new 9] [--rounds 7] [--seconds 15] [--clock wall] [--folder DIR]
        [--json out.json]

A LLaMA of about 1 B parameters with random weights in bfloat16, once with keys and values for
every head and once with groups of queries. Correctness first: over the same tokens, the logits of
single steps by both ways are compared with the same model in single precision, and ours may be no
further from it than 1.2 times stock's. Then the ways take turns, for `--rounds` rounds, or for
`--seconds` and at least three.

decode   steps of generate() over a cache with that many positions, against stock's cache and SDPA,
         and against two limits: all bytes that a step reads, at the rate at which threads read;
         and the roofline, where weights take as long as to read them or as torch's arithmetic with
         many rows, whichever is longer, and keys and values as long as to read them
prefill  generate() of one token; prompts of over 1024 tokens with `--prefill-layers` layers
disk     weights that do not fit the near node, 32 rows: benchmarks/disk_offload.py says what of
         it is simulated
llama    llama.cpp with weights of both types of 16 bits, 1 row, where it is installed

Reported are medians and 95 % bootstrap intervals of the paired ratios, measured but for what is
named predicted. At the end stand the bars, which the medians have to reach; that of a bar "not
slower" is 1. The defaults take about 10 GiB of memory and a quarter of an hour. `--clock cpu` takes
CPU seconds of the process instead of wall time, for a machine that is busy with other work; such
figures are an indication, not the bar's.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks import disk_offload, llama_cpp_peer
from benchmarks.bars import Bar, print_bars
from benchmarks.llama_shape import (
    Pace,
    Way,
    arithmetic_seconds,
    bound_seconds,
    cache_bytes,
    decode_seconds,
    first_layers,
    in_turns,
    make_model,
    prefill_seconds,
    random_ids,
    weight_bytes,
)
from benchmarks.measurements import Ratio, describe_machine, paired_ratio, write_json
from cxl_offload.integrations.transformers import offload

ROWS = ("decode", "prefill", "disk", "llama")
CHECKED_STEPS = 4
MOST_ERROR = 1.2
"""Of logits that differ by rounding alone."""

LONG_PREFILL = 1024
QUICK = {"layers": 2, "rounds": 3, "new": 5, "seconds": 5.0}
LEAST = {(32, 512, False): 7.0, (32, 512, True): 3.0}
"""Rows, positions and whether queries are grouped: how often stock's speed is the bar."""

DISK_LEAST, LLAMA_LEAST = 3.0, 0.9


def step_logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Of single tokens after a prompt, float32."""
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        steps = []
        for token in range(1, 1 + CHECKED_STEPS):
            made = model(torch.full_like(ids[:, :1], token), past_key_values=cache)
            steps.append(made.logits[:, -1].float())
    return torch.stack(steps)


def check(model: LlamaForCausalLM, ours: Way) -> dict[str, float]:
    """How far both ways are from single precision; ends the program where ours is too far."""
    ids = random_ids(2, 40)
    stock = step_logits(model, ids)
    with ours():
        made = step_logits(model, ids)
    model.float()
    exact = step_logits(model, ids)
    model.to(torch.bfloat16)
    errors = {
        name: float((got - exact).abs().mean()) for name, got in (("stock", stock), ("ours", made))
    }
    if not errors["ours"] <= MOST_ERROR * errors["stock"]:
        raise SystemExit(f"wrong: mean errors of logits are {errors}")
    return errors


def compare(
    model: LlamaForCausalLM, ours: Way, phase: str, shape: tuple[int, int], args: Any, pace: Pace
) -> dict[str, Any]:
    """Tokens/s of a phase by both ways, and their ratio."""
    batch, prompt = shape
    ids = random_ids(batch, prompt)
    layers = args.prefill_layers if batch * prompt > LONG_PREFILL else args.layers

    def seconds(way: Way) -> float:
        if phase == "decode":
            return decode_seconds(model, way, ids, args.new, pace.now)
        with first_layers(model, layers):
            return prefill_seconds(model, way, ids, pace.now)

    steps = {"stock": lambda: seconds(nullcontext), "ours": lambda: seconds(ours)}
    weights, cache = weight_bytes(model), cache_bytes(model, batch, prompt)
    if phase == "decode":
        steps["bound"] = lambda: bound_seconds(model, weights + cache, args.threads)
        steps["arithmetic"] = lambda: arithmetic_seconds(model, batch, pace.now)
    samples = in_turns(steps, pace)
    ratio = paired_ratio(samples["stock"], samples["ours"])
    tokens = batch * (prompt if phase == "prefill" else 1)
    found: dict[str, Any] = {
        f"{name}_tokens_per_s": tokens / statistics.median(taken) for name, taken in samples.items()
    }
    found |= {"times_stock": ratio.median, "low": ratio.low, "high": ratio.high}
    if phase == "prefill":
        return found | {"layers": layers}
    of_weights = weights / (weights + cache)
    roofline = [
        max(read * of_weights, arithmetic) + read * (1 - of_weights)
        for read, arithmetic in zip(samples["bound"], samples["arithmetic"], strict=True)
    ]
    return found | {
        "step_bytes": weights + cache,
        "bound_bytes_per_s": (weights + cache) / statistics.median(samples["bound"]),
        "of_bound": asdict(paired_ratio(samples["bound"], samples["ours"])),
        "bound_times_stock": asdict(paired_ratio(samples["stock"], samples["bound"])),
        "of_roofline": asdict(paired_ratio(roofline, samples["ours"])),
        "roofline_times_stock": asdict(paired_ratio(samples["stock"], roofline)),
    }


def generated(args: argparse.Namespace, pace: Pace) -> Iterator[dict[str, Any]]:
    """A row for each shape of cache and batch."""
    phases = [phase for phase in ("decode", "prefill") if phase in args.rows]
    for kv_heads in args.kv_heads if phases else ():
        model = make_model(args, kv_heads)

        def ours(model: LlamaForCausalLM = model) -> AbstractContextManager[Any]:
            return offload(model, {"kv": args.policy}, linear_rows=args.linear_rows)

        errors = check(model, ours)
        for shape in itertools.product(args.batches, args.prompts):
            row: dict[str, Any] = {"kv_heads": kv_heads, "batch": shape[0], "prompt": shape[1]}
            for phase in phases:
                row[phase] = compare(model, ours, phase, shape, args, pace)
            yield {**row, "mean_error_of_logits": errors}


def bars(document: dict[str, Any], heads: int) -> list[Bar]:
    """What is asked of the medians of the rows that were measured."""
    made = []
    for row in document["rows"]:
        grouped = row["kv_heads"] != heads
        case = f"{row['batch']} x {row['prompt']}{', grouped queries' if grouped else ''}"
        for phase in ("decode", "prefill"):
            if phase not in row:
                continue
            shape = (row["batch"], row["prompt"], grouped)
            least = LEAST.get(shape, 1.0) if phase == "decode" else 1.0
            found = row[phase]
            ratio = Ratio(found["times_stock"], found["low"], found["high"])
            made.append(Bar(f"{phase} {case}, times stock", ratio, least, "median"))
    for row in document["disk"]:
        if not row["page_cache"]:
            case = f"{row['near_share']:.0%} of the weights near, times accelerate's disk offload"
            made.append(Bar(f"decode 32 x 32, {case}", Ratio(*row["ratio"]), DISK_LEAST, "median"))
    for row in document["llama"]:
        case = f"decode 1 x {row['prompt']}, times llama.cpp with {row['weights']}"
        made.append(Bar(case, Ratio(*row["ratio"]), LLAMA_LEAST, "median"))
    return made


def print_generated(rows: Sequence[dict[str, Any]]) -> None:
    print("\ntokens/s, measured; the read bound is a step's bytes at the rate of the same run's")
    print("reads, the roofline adds the arithmetic where it takes longer than the weights\n")
    print(
        "| KV heads | rows x prompt | phase | stock | ours | ours of the read bound "
        "| ours of the roofline | roofline over stock |"
    )
    print("|---:|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        for phase in ("decode", "prefill"):
            if phase in row:
                found = row[phase]
                layers = f", {found['layers']} layers" if phase == "prefill" else ""
                limits = [
                    f"{found[name]['median']:.2f}" if name in found else ""
                    for name in ("of_bound", "of_roofline", "roofline_times_stock")
                ]
                print(
                    f"| {row['kv_heads']} | {row['batch']} x {row['prompt']} | {phase}{layers} | "
                    f"{found['stock_tokens_per_s']:.1f} | {found['ours_tokens_per_s']:.1f} | "
                    f"{' | '.join(limits)} |"
                )


def print_disk(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "\naccelerate's disk offload, s a step of 32 rows; our nodes are simulated: a far tier at"
    )
    print("this memory's speed. Predicted: with a CXL card's bandwidth, nothing overlapped.\n")
    print("| weights near | files | accelerate | read of disks | ours | times | predicted |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for row in rows:
        files = "in the page cache" if row["page_cache"] else "dropped before a step"
        print(
            f"| {row['near_share']:.0%} | {files} | {row['stock_s']:.3f} | "
            f"{row['read_bytes_a_step'] / 2**20:.0f} MiB | {row['ours_s']:.3f} | "
            f"{row['ratio'][0]:.2f} | {row['predicted_on_cxl']:.2f} |"
        )


def print_llama(rows: Sequence[dict[str, Any]]) -> None:
    print("\nllama.cpp, tokens/s and GB/s of weights at 1 row, measured\n")
    print("| its weights | prompt | llama.cpp | | ours, bf16 | |\n|---|---:|---:|---:|---:|---:|")
    for row in rows:
        cells = [
            f"{row['tokens_per_s'][name]:.1f} | {row['weight_bytes_per_s'][name] / 1e9:.1f}"
            for name in ("llama_cpp", "ours")
        ]
        print(f"| {row['weights']} | {row['prompt']} | {' | '.join(cells)} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="two layers and few rounds")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    shape = {"layers": 16, "hidden": 2048, "inner": 5632, "heads": 32, "prefill-layers": 2}
    for name, default in (shape | {"threads": 2, "new": 9, "rounds": 7}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--linear-rows",
        type=lambda text: text if text == "fastest" else int(text),
        default="fastest",
        help="as of offload()",
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of a row and phase")
    parser.add_argument("--policy", default="bind:0")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on a disk")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in QUICK.items() if args.quick else ():
        if getattr(args, name) == parser.get_default(name):
            setattr(args, name, value)
    if args.new < 3:
        parser.error("--new: at least 3, the first token of two is no step")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    now = time.process_time if args.clock == "cpu" else time.perf_counter
    pace = Pace(args.rounds, args.seconds, now)
    lacking = llama_cpp_peer.missing() if "llama" in args.rows else ""
    if lacking:
        print(f"llama.cpp is left out: {lacking} not installed")
    sources = {
        "rows": generated(args, pace),
        "disk": disk_offload.compare(args, pace) if "disk" in args.rows else (),
        "llama": llama_cpp_peer.compare(args, pace) if "llama" in args.rows and not lacking else (),
    }
    document: dict[str, Any] = {"machine": describe_machine(), "kind": "measured"}
    document["options"] = {name: str(value) for name, value in vars(args).items()}
    document |= {kind: [] for kind in sources} | {"wrong": {}}
    try:
        for kind, source in sources.items():
            try:
                for row in source:
                    document[kind].append(row)
                    print(f"  measured: {kind} {list(row.items())[:3]}", flush=True)
            except SystemExit as wrong:  # what others measured before and after it stands
                print(f"{kind}: {wrong}", flush=True)
                document[kind], document["wrong"][kind] = [], str(wrong)
    except KeyboardInterrupt:
        print("interrupted: the rows below are those that were whole", flush=True)
    return document


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is measured is shown then
    document = measure(args)
    for kind, show in (("rows", print_generated), ("disk", print_disk), ("llama", print_llama)):
        if document[kind]:
            show(document[kind])
    met = print_bars(bars(document, args.heads))
    if args.json is not None:
        write_json(args.json, document)
    if document["wrong"]:
        print(f"\nno rows of {', '.join(document['wrong'])}, because something was wrong")
        raise SystemExit(2)
    if not met:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
