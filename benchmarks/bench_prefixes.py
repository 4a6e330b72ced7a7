"""Time to the first token under generate(): a prompt computed, computed and kept, and found.

    python -m benchmarks.bench_prefixes [--layers 8] [--hidden 1024] [--inner 2816] [--heads 16]
        [--kv-heads 4] [--prompt 1024] [--shared 960] [--rows 1] [--policy bind:0] [--rounds 7]
        [--clock wall] [--json out.json]

A LLaMA with random weights in bfloat16. Three ways take turns: without a store; with one, and a
prompt that it does not know, so that all blocks are written; and with one that knows the first
``--shared`` tokens of the prompt. Each generates one token of another prompt in every round, so
that only what is meant to be found is. Reported are medians of seconds and 95 % bootstrap intervals
of the paired ratios over the way without a store. All figures are measured. `--clock cpu` takes CPU
seconds of the process, for a machine that is busy with other work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama_shape import VOCAB, make_model
from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload.integrations.transformers import KeptPrefixes, offload

WAYS = ("no store", "all written", "shared found")


def prompt(args: argparse.Namespace, way: str, turn: int) -> torch.Tensor:
    """Nobody has seen it, except for the beginning that one way shares."""
    numbers = torch.Generator().manual_seed(1000 + 10 * turn + WAYS.index(way))
    ids = torch.randint(3, VOCAB, (args.rows, args.prompt), generator=numbers)
    if way == "shared found":
        shared = torch.randint(
            3, VOCAB, (args.rows, args.shared), generator=torch.Generator().manual_seed(1)
        )
        ids[:, : args.shared] = shared
    return ids


def measure(args: argparse.Namespace) -> dict[str, Any]:
    now: Callable[[], float] = time.process_time if args.clock == "cpu" else time.perf_counter
    model = make_model(args, args.kv_heads)
    policies, seconds = {"kv": args.policy}, {way: list[float]() for way in WAYS}

    def first_token(way: str, turn: int) -> float:
        ids = prompt(args, way, turn)
        begin = now()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
        return now() - begin

    kept, found_tokens = KeptPrefixes(bytes=args.bytes), 0
    for turn in range(args.rounds + 1):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            prefixes = None if way == "no store" else kept
            with offload(model, policies, prefixes=prefixes) as done:
                if way == "shared found":
                    first_token(way, -1)
                seconds[way].append(first_token(way, turn))
                if way == "shared found" and done.prefixes is not None:
                    found_tokens = done.prefixes.found_tokens
    if found_tokens != args.rows * (args.shared // 16 * 16):
        raise SystemExit(f"{found_tokens} tokens were found")
    ratios = {way: paired_ratio(seconds[way][1:], seconds[WAYS[0]][1:]) for way in WAYS[1:]}
    return {
        "machine": describe_machine(),
        "arguments": vars(args) | {"json": None},
        "seconds": {way: statistics.median(each[1:]) for way, each in seconds.items()},
        "ratios": {way: [each.median, each.low, each.high] for way, each in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 8, "hidden": 1024, "inner": 2816, "heads": 16, "kv-heads": 4}
    sizes |= {"prompt": 1024, "shared": 960, "rows": 1, "rounds": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--policy", default="bind:0")
    parser.add_argument("--bytes", default="256MiB")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args)
    print(f"{args.rows} x {args.prompt} tokens, of which {args.shared} are shared; measured")
    for way, median in found["seconds"].items():
        of = found["ratios"].get(way)
        said = "" if of is None else f", {of[0]:.3f} [{of[1]:.3f}, {of[2]:.3f}] of no store"
        print(f"{way:>12}: first token after {median:.3f} s{said}")
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
