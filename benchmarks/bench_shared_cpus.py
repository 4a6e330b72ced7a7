"""How OpenMP's threads wait for each other: what `share_cpus()` gains beside a busy process.

    python -m benchmarks.bench_shared_cpus [--rounds N] [--seconds S] [--json FILE]

Decodes with a LLaMA whose KV cache is in a block of `offload()`, and trains a small encoder with
CPUAdam, alone and beside a process that keeps a CPU and the memory busy (neighbour.py). Threads
wait in three ways that take turns in one process: they spin, as OpenMP lets them by default; they
spin and sleep as `share_cpus()` finds right; and they always sleep at once, which tells why that is
not the only way. Every figure is measured. At the end stand the bars: alone, `share_cpus()` costs
nothing (0.98 of spinning by the lower end), and beside the neighbour it is not slower.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bars import bars_of, print_bars
from benchmarks.conditions import Conditions
from benchmarks.measurements import describe_machine, paired_ratio, write_json
from benchmarks.neighbour import QUIET, Neighbour
from cxl_offload import _C, CPUAdam
from cxl_offload.integrations.transformers import offload

SPINNING, SHARING, SLEEPING = "spinning", "share_cpus()", "sleeping at once"
_SPINS = "GOMP_SPINCOUNT"

Step = Callable[[], Any]


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Blocks that begin inside watch nothing; OpenMP itself read the variable long ago."""
    os.environ[_SPINS] = "300000"
    try:
        yield
    finally:
        del os.environ[_SPINS]


@contextlib.contextmanager
def holding(make: Callable[[], Any]) -> Iterator[None]:
    held = make()
    yield
    del held


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    SPINNING: contextlib.nullcontext,
    # A watch of its own, because a block shares that of the block around it, if it has one.
    SHARING: lambda: holding(_C.SharedCpus),
    SLEEPING: lambda: holding(_C.SleepingWaits),
}


def decoding(stack: contextlib.ExitStack) -> Step:
    """Eight tokens of four rows, with their prompts of 32."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    tokens = torch.randint(config.vocab_size, (4, 32))
    with unwatched():
        stack.enter_context(offload(model, {"kv": "first-touch"}, linear_rows="fastest"))
    return lambda: model.generate(
        tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )


def training(stack: contextlib.ExitStack) -> Step:
    """A step of 4 x 64 vectors through six layers of 512, in single precision."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    optimizer = CPUAdam(model.parameters(), lr=1e-4)
    given = torch.randn(4, 64, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    return step


CASES = {"generate()": decoding, "training with CPUAdam": training}


def seconds_of(step: Step, way: str, least_s: float) -> float:
    """Of a step, the mean over so many as take ``least_s``."""
    with WAYS[way]():
        began, steps = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < least_s or steps == 0:
            step()
            steps += 1
    return took / steps


def measure(options: argparse.Namespace, conditions: Conditions) -> list[dict[str, Any]]:
    """Samples and ratios of every case and condition."""
    results = []
    for case, make in CASES.items():
        with contextlib.ExitStack() as stack:
            step = make(stack)
            step()
            samples: dict[str, dict[str, list[float]]] = {
                condition: {way: [] for way in WAYS} for condition in conditions.names
            }
            for number in range(options.rounds):
                for condition in conditions.of_round(number):
                    for way in reversed(WAYS) if number % 2 else WAYS:
                        samples[condition][way].append(seconds_of(step, way, options.seconds))
        results += [result_of(case, condition, found) for condition, found in samples.items()]
    return results


def result_of(case: str, condition: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and how many times as fast as spinning each way was."""
    return {
        "case": case if condition == QUIET else f"{case}, {condition}",
        "kind": "measured",
        "s": {way: statistics.median(each) for way, each in samples.items()},
        "over_spinning": {
            way: asdict(paired_ratio(samples[SPINNING], samples[way]))
            for way in WAYS
            if way != SPINNING
        },
    }


def show(results: list[dict[str, Any]]) -> None:
    width = max(len(each["case"]) for each in results) + 2
    print(" " * width + "".join(f"{f'{way}, ms':>24}" for way in WAYS) + "  over spinning")
    for each in results:
        times = "".join(f"{1e3 * each['s'][way]:>24.1f}" for way in WAYS)
        ratios = (
            f"{ratio['median']:.2f} ({ratio['low']:.2f} .. {ratio['high']:.2f})"
            for ratio in each["over_spinning"].values()
        )
        print(f"{each['case']:{width}}{times}  {', '.join(ratios)}")


def main() -> int:
    """Runs the benchmark; 1 where a bar is missed, 2 where threads wait in one way only."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a sample, at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := _C.why_openmp_cannot_sleep():
        print(f"threads wait in one way only: {why}")
        return 2
    torch.manual_seed(0)
    document = {**describe_machine(), "rounds": options.rounds}
    with Neighbour() as neighbour:
        document["results"] = measure(options, Conditions(neighbour))
        document["neighbour_did"] = neighbour.describe()
    show(document["results"])
    good = print_bars([*bars_of("shared_cpus", document)])
    if options.json is not None:
        write_json(options.json, document)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
