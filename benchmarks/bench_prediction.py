"""Decode tokens/s as predicted from a profile of operators, and as FlexGen then runs.

The profile (`cxl-offload profile --operators cpu`) runs no FlexGen and no model. Operators are
profiled before and after every three configurations; the prediction is the mean of both, so that
what else the machine does meanwhile hits both sides. Where the two profiles, or repeats of a run,
differ by more than 10 %, the three are tried again. The CPUs stand in for a GPU. The prompt's KV
cache is filled with seeded numbers (skipped_prompt.py): only decoding is timed. Every figure but
the predictions is measured.

`--clock cpu` takes both sides in the processor's time of this process instead of the wall's: an
indication of what a machine of one's own would give, where others use the cores too.

    python -m benchmarks.bench_prediction [--rounds N] [--layers N --hidden N] [--clock cpu]
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import check_plot, describe_machine, write_json
from benchmarks.skipped_prompt import skipped_prompt
from cxl_offload import Session
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, OptShape, make_opt
from cxl_offload.integrations.flexgen.expected import decode_shape
from cxl_offload.memory.heap import keep_freed_memory
from cxl_offload.plan.flexgen.decode_time import DecodeShape, decode_time
from cxl_offload.profile.operators.measure import measure_operators
from cxl_offload.profile.operators.model import OperatorProfile

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
SETTLED = 0.1


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


@dataclass(frozen=True)
class Group:
    """Configurations of one home of the KV cache, between two profiles.

    Attributes
    ----------
    runs
        Tokens/s of every repeat.
    unrest
        By how much the two profiles' predictions, or the repeats, differ at most.
    """

    runs: dict[str, list[float]]
    predicted: dict[str, float]
    terms: dict[str, dict[str, float]]
    unrest: float


class Comparison:
    """Runs groups of configurations, each after a profile and followed by another."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        heads = options.hidden // HEAD_DIM
        size = OptShape(layers=options.layers, hidden=options.hidden, heads=heads)
        model = make_opt(folder / "opt", size, seed=1)
        self.configurations = requests(model, size.vocab, options.prompt_len, options.gen_len)
        self.loud = 0
        self._options = options
        self._clock = CLOCKS[options.clock]
        self._session = Session.linux()
        self._profile = self._measured()

    def _measured(self) -> OperatorProfile:
        return measure_operators(seconds=self._options.seconds, clock=self._clock)

    def settled(self, home: str) -> Group:
        """The first try in which the machine did not change, or the one where it did least.

        What is predicted and measured is not looked at.
        """
        tries = []
        for _ in range(self._options.tries):
            tries.append(self._tried(home))
            if tries[-1].unrest <= SETTLED:
                break
        else:
            self.loud += 1
        return min(tries, key=lambda each: each.unrest)

    def _tried(self, home: str) -> Group:
        runs: dict[str, list[float]] = {}
        shapes: dict[str, DecodeShape] = {}
        for name, request in self.configurations.items():
            if not name.endswith(f"KV on {home}"):
                continue
            with LoadedModel(request, session=self._session) as loaded, skipped_prompt():
                loaded.generate()
                runs[name] = [
                    decode_speed(loaded, self._clock) for _ in range(self._options.repeats)
                ]
                shapes[name] = decode_shape(
                    request,
                    loaded.source.config,
                    prompt_len=self._options.prompt_len,
                    shares=loaded.layout.rows,
                )
        before, self._profile = self._profile, self._measured()
        predicted, terms = {}, {}
        unrest = max(max(each) / min(each) - 1 for each in runs.values())
        for name, shape in shapes.items():
            times = [decode_time(shape, operators) for operators in (before, self._profile)]
            seconds = [each.token_s for each in times]
            predicted[name] = shape.rows / statistics.fmean(seconds)
            terms[name] = dict(times[-1].terms)
            unrest = max(unrest, max(seconds) / min(seconds) - 1)
        return Group(runs, predicted, terms, unrest)


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], int]:
    """Predicted and measured tokens/s of every configuration, and how many groups were loud."""
    comparison = Comparison(options, folder)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    terms: dict[str, dict[str, float]] = {}
    for _, home in itertools.product(range(options.rounds), HOMES):
        group = comparison.settled(home)
        terms |= group.terms
        for name, runs in group.runs.items():
            found[name]["measured"].append(statistics.median(runs))
            found[name]["predicted"].append(group.predicted[name])
    every = [result_of(name, found[name], terms[name]) for name in comparison.configurations]
    return every, comparison.loud


def decode_speed(loaded: LoadedModel, clock: Callable[[], float]) -> float:
    """Sequences over the median second of a token that was computed without an interruption.

    Without five such tokens, which then show in the errors' spread, of all.
    """
    begun: list[tuple[float, int]] = []

    def begins(_: int) -> None:
        begun.append((clock(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw))

    loaded.generate(token_begins=begins)
    tokens = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in itertools.pairwise(begun[1:])
    ]
    alone = [seconds for seconds, interruptions in tokens if not interruptions]
    every = [seconds for seconds, _ in tokens]
    return loaded.request.rows / statistics.median(alone if len(alone) >= ALONE else every)


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
    every = [each["measured_tokens_per_s"] for each in results]
    ends = np.array([0.7 * min(every), 1.4 * max(every)])
    axes.plot(ends, ends, color="0.5", lw=1)
    axes.fill_between(ends, ends * (1 - BAR), ends * (1 + BAR), color="0.9", label="within 15 %")
    axes.set(xscale="log", yscale="log", xlabel="decode tokens/s, measured")
    axes.set(ylabel="decode tokens/s, predicted", title="FlexGen, CPU as accelerator")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="until the machine does not change")
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
    check_plot(options.plot)
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu counts the waiting of other threads as work: give --threads 1")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        results, loud = measure(options, Path(scratch))
    console = Console()
    show(console, results)
    if loud:
        groups = options.rounds * len(HOMES)
        console.print(f"the machine did not settle in {loud} of {groups} groups of runs")
    if options.plot is not None:
        save_plot(options.plot, results)
    if options.json is not None:
        settings = {
            name: value for name, value in vars(options).items() if name not in ("json", "plot")
        }
        document = {**describe_machine(), "settings": settings, "loud": loud, "results": results}
        write_json(options.json, document)


if __name__ == "__main__":
    main()
