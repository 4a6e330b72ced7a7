"""Decode tokens/s as predicted from a profile of operators, and as FlexGen then runs.

The profile (`cxl-offload profile --operators cpu`) runs no FlexGen and no model. Operators are
profiled before and after every three configurations; the prediction is the mean of both, so that
what else the machine does meanwhile hits both sides. The CPUs stand in for a GPU. The prompt's KV
cache is filled with seeded numbers (skipped_prompt.py): only decoding is timed. Every figure but
the predictions is measured.

`--clock cpu` takes both sides in the processor's time of this process instead of the wall's: an
indication of what a machine of one's own would give, where others use the cores too.

    python benchmarks/bench_prediction.py [--rounds N] [--layers N --hidden N] [--clock cpu]
        [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measurements import describe_machine, write_json
from rich.console import Console
from rich.table import Table
from skipped_prompt import skipped_prompt

from cxl_offload import Memory
from cxl_offload.executor.operators import measure_operators
from cxl_offload.integrations.flexgen import FlexGenRun, OptShape, Session, make_opt
from cxl_offload.integrations.flexgen.expected import decode_shape
from cxl_offload.memory.heap import keep_freed_memory
from cxl_offload.plan.flexgen.decode_time import DecodeShape, decode_time

HEAD_DIM = 64
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
BATCHES = (1, 8, 32)
HOMES: dict[str, dict[str, Any]] = {
    "accelerator": {"percent": (100, 0, 100, 0, 100, 0)},
    "host, in place": {"percent": (100, 0, 0, 100, 100, 0), "cpu_cache_compute": True},
    "host, loaded": {"percent": (100, 0, 0, 100, 100, 0)},
}
BAR = 0.15
ALONE = 5


def requests(model: Path, vocab: int, prompt_len: int, gen_len: int) -> dict[str, FlexGenRun]:
    """A request for every batch and home of the KV cache."""
    made = {}
    for batch in BATCHES:
        random = np.random.default_rng(0)
        tokens = random.integers(16, vocab, size=(batch, prompt_len)).tolist()
        for home, options in HOMES.items():
            made[f"batch {batch}, KV on {home}"] = FlexGenRun(
                model=str(model),
                token_ids=tuple(tuple(row) for row in tokens),
                gen_len=gen_len,
                gpu_batch_size=batch,
                record=False,
                accelerator="host",
                **options,
            )
    return made


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Predicted and measured tokens/s of every configuration, round by round."""
    heads = options.hidden // HEAD_DIM
    size = OptShape(layers=options.layers, hidden=options.hidden, heads=heads)
    model = make_opt(folder / "opt", size, seed=1)
    configurations = requests(model, size.vocab, options.prompt_len, options.gen_len)
    clock = CLOCKS[options.clock]
    memory = Memory.linux()
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    terms: dict[str, dict[str, float]] = {}
    before = measure_operators(seconds=options.seconds, clock=clock)
    for _, home in itertools.product(range(options.rounds), HOMES):
        shapes: dict[str, DecodeShape] = {}
        for name in [name for name in configurations if name.endswith(f"KV on {home}")]:
            with Session(configurations[name], memory=memory) as session, skipped_prompt():
                session.generate()
                runs = [decode_speed(session, clock) for _ in range(options.repeats)]
                config = session.model.config
            shapes[name] = decode_shape(configurations[name], config, prompt_len=options.prompt_len)
            found[name]["measured"].append(statistics.median(runs))
        after = measure_operators(seconds=options.seconds, clock=clock)
        for name, shape in shapes.items():
            times = [decode_time(shape, operators) for operators in (before, after)]
            seconds = statistics.fmean(each.token_s for each in times)
            found[name]["predicted"].append(shape.rows / seconds)
            terms[name] = dict(times[-1].terms)
        before = after
    return [result_of(name, found[name], terms[name]) for name in configurations]


def decode_speed(session: Session, clock: Callable[[], float]) -> float:
    """Sequences over the median second of a token that was computed without an interruption.

    Without five such tokens, which then show in the errors' spread, of all.
    """
    begun: list[tuple[float, int]] = []

    def begins(_: int) -> None:
        begun.append((clock(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw))

    session.generate(token_begins=begins)
    tokens = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(begun[1:])
    ]
    alone = [seconds for seconds, interruptions in tokens if not interruptions]
    every = [seconds for seconds, _ in tokens]
    return session.request.rows / statistics.median(alone if len(alone) >= ALONE else every)


def result_of(name: str, found: dict[str, list[float]], terms: dict[str, float]) -> dict[str, Any]:
    """Medians over the rounds; the error is the median of the rounds' own."""
    pairs = list(zip(found["predicted"], found["measured"], strict=True))
    error = statistics.median(predicted / measured - 1 for predicted, measured in pairs)
    return {
        "configuration": name,
        "measured_tokens_per_s": statistics.median(found["measured"]),
        "predicted_tokens_per_s": statistics.median(found["predicted"]),
        "error": error,
        "errors_of_rounds": [predicted / measured - 1 for predicted, measured in pairs],
        "within_bar": abs(error) <= BAR,
        "predicted_terms_s": terms,
    }


def show(console: Console, results: list[dict[str, Any]]) -> None:
    """The table."""
    made = Table(title="Decode tokens/s: predicted after a profile, and measured")
    made.add_column("configuration")
    for heading in ("predicted", "measured", "error", "rounds", "largest term"):
        made.add_column(heading, justify="right")
    for result in results:
        terms = result["predicted_terms_s"]
        largest = max(terms, key=lambda name: terms[name])
        errors = result["errors_of_rounds"]
        made.add_row(
            result["configuration"],
            f"{result['predicted_tokens_per_s']:.1f}",
            f"{result['measured_tokens_per_s']:.1f}",
            f"{result['error']:+.1%}",
            f"{min(errors):+.0%} to {max(errors):+.0%}",
            f"{largest} ({terms[largest] / sum(terms.values()):.0%})",
        )
    console.print(made)
    within = sum(result["within_bar"] for result in results)
    console.print(f"{within} of {len(results)} within {BAR:.0%}")


def save_plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Predicted against measured, with the bar."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 5), layout="constrained")
    for home in HOMES:
        chosen = [each for each in results if each["configuration"].endswith(home)]
        measured = [each["measured_tokens_per_s"] for each in chosen]
        predicted = [each["predicted_tokens_per_s"] for each in chosen]
        axes.plot(measured, predicted, "o", label=f"KV on {home}")
    ends = np.array([0.7 * min(measured), 1.4 * max(measured)])
    axes.plot(ends, ends, color="0.5", lw=1)
    axes.fill_between(ends, ends * (1 - BAR), ends * (1 + BAR), color="0.9", label="within 15 %")
    axes.set(xscale="log", yscale="log", xlabel="decode tokens/s, measured")
    axes.set(ylabel="decode tokens/s, predicted", title="FlexGen, CPU as accelerator")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each profile")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--gen-len", type=int, default=17)
    parser.add_argument("--layers", type=int, default=12, help="as OPT-125M's")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu counts the waiting of other threads as work: give --threads 1")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        results = measure(options, Path(scratch))
    show(Console(), results)
    if options.plot is not None:
        save_plot(options.plot, results)
    if options.json is not None:
        kept = ("rounds", "repeats", "seconds", "prompt_len", "gen_len", "threads")
        kept += ("layers", "hidden", "clock")
        settings = {name: getattr(options, name) for name in kept}
        document = {**describe_machine(), "settings": settings, "results": results}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
