"""Decoding under generate(): KV in a tier, against transformers' own cache and SDPA.

    python -m benchmarks.bench_transformers [--batches 1 8 32] [--prompts 32 512] [--kv-heads 32 8]
        [--layers 16] [--hidden 2048] [--inner 5632] [--heads 32] [--policy bind:0]
        [--linear-rows 0] [--new 9] [--rounds 5] [--clock wall] [--json out.json]

A LLaMA of about 1 B parameters with random weights in bfloat16, once with keys and values for
every head and once with groups of queries. Correctness first: over the same tokens, the logits of
single steps by both ways are compared with the same model in single precision, and ours may be no
further from it than 1.2 times stock's. Then stock and ours generate in turns; the clock is read
after every token, so that the prompt and the rest are told apart. Reported are medians of tokens/s
and 95 % bootstrap intervals of the paired ratios, slowest first. All figures are measured.

The defaults take about 10 GiB of memory. `--clock cpu` takes CPU seconds of the process instead of
wall time, for a machine that is busy with other work; such figures are an indication, not the
bar's. accelerate's disk offload and llama.cpp are no part of it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.measurements import describe_machine, paired_ratio, write_json
from cxl_offload.integrations.transformers import offload

VOCAB = 4096
CHECKED_STEPS = 4
MOST_ERROR = 1.2
"""Of logits that differ by rounding alone."""

Way = Callable[[], AbstractContextManager[Any]]


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Reads the clock after every token and never stops."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.times = [now()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(self._now())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def make_model(args: argparse.Namespace, kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("sdpa")
    return model


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
    ids = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
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


def timed(
    model: LlamaForCausalLM, way: Way, ids: torch.Tensor, new: int, now: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of the prompt and of a decode step."""
    with way():
        clock = Clock(now)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    start, first, *_, last = clock.times
    return first - start, (last - first) / (new - 1)


def compare(
    model: LlamaForCausalLM, ours: Way, batch: int, prompt: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row of the table."""
    now = time.process_time if args.clock == "cpu" else time.perf_counter
    ids = torch.randint(3, VOCAB, (batch, prompt), generator=torch.Generator().manual_seed(1))
    samples: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
    ways: dict[str, Way] = {"stock": nullcontext, "ours": ours}
    for turn in range(args.rounds + 1):
        for name in sorted(ways, reverse=turn % 2 == 0):
            took = timed(model, ways[name], ids, args.new, now)
            if turn > 0:  # the first turn warms memory and threads
                samples[name].append(took)
    row: dict[str, Any] = {"batch": batch, "prompt": prompt}
    for at, phase in enumerate(("prefill", "decode")):
        seconds = {name: [each[at] for each in taken] for name, taken in samples.items()}
        tokens = batch * (prompt if phase == "prefill" else 1)
        ratio = paired_ratio(seconds["stock"], seconds["ours"])
        row[phase] = {
            **{
                f"{name}_tokens_per_s": tokens / statistics.median(taken)
                for name, taken in seconds.items()
            },
            "times_stock": ratio.median,
            "low": ratio.low,
            "high": ratio.high,
        }
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--policy", default="bind:0")
    parser.add_argument("--linear-rows", type=int, default=0)
    parser.add_argument("--new", type=int, default=9, help="tokens a run, at least 2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    rows = []
    for kv_heads in args.kv_heads:
        model = make_model(args, kv_heads)

        def ours(model: LlamaForCausalLM = model) -> AbstractContextManager[Any]:
            return offload(model, {"kv": args.policy}, linear_rows=args.linear_rows)

        errors = check(model, ours)
        for batch, prompt in itertools.product(args.batches, args.prompts):
            row = {"kv_heads": kv_heads, **compare(model, ours, batch, prompt, args)}
            rows.append({**row, "mean_error_of_logits": errors})
            print(f"  measured {kv_heads} KV heads, {batch} x {prompt}", flush=True)
    rows.sort(key=lambda row: row["decode"]["times_stock"])
    print(
        f"\n{'KV heads':>8} {'batch':>5} {'prompt':>6}  decode tokens/s: stock, ours, times stock"
        "        prefill times stock"
    )
    for row in rows:
        decode, prefill = row["decode"], row["prefill"]
        print(
            f"{row['kv_heads']:>8} {row['batch']:>5} {row['prompt']:>6}  "
            f"{decode['stock_tokens_per_s']:>10.1f} {decode['ours_tokens_per_s']:>10.1f} "
            f"{decode['times_stock']:>6.2f} [{decode['low']:.2f}, {decode['high']:.2f}]   "
            f"{prefill['times_stock']:>6.2f} [{prefill['low']:.2f}, {prefill['high']:.2f}]"
        )
    if args.json is not None:
        options = {name: str(value) for name, value in vars(args).items()}
        write_json(args.json, {"machine": describe_machine(), "options": options, "rows": rows})


if __name__ == "__main__":
    main()
