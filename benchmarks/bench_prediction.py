"""Tokens/s as predicted from a profile of operators, and as transformers and FlexGen then run.

The profile (`cxl-offload profile --operators cpu`) runs no framework and no model. The operators
that a prediction asks for are profiled before and after its configuration, in every round; the
prediction is the mean of both, so that what else the machine does hits both sides. The error of a
configuration is the median over the rounds. Of transformers whole generations are compared with the
planner's tokens/s, of FlexGen decoding with the sum of its operators: the prompt's KV cache is
filled with seeded numbers (skipped_prompt.py). The CPUs stand in for a GPU. Nothing is tried again:
no new round begins that would not end within `--minutes`. Every figure but the predictions is
measured.

`--clock cpu` takes both sides in the processor's time of this process instead of the wall's, with
one thread: an indication of what a machine of one's own would give, where others use the cores too.

    python -m benchmarks.bench_prediction [--quick] [--rounds N] [--minutes M] [--clock cpu]
        [--layers N --hidden N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import check_plot, describe_machine, write_json
from benchmarks.predicted_runs import (
    Now,
    Operators,
    PredictedRun,
    Sizes,
    flexgen_runs,
    transformers_runs,
)
from cxl_offload.memory.heap import keep_freed_memory
from cxl_offload.profile.operators.measure import measure_operators
from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.topology import discover

CLOCKS: dict[str, Now] = {"wall": time.perf_counter, "cpu": time.process_time}
BAR = 0.10


def rounds_of(
    runs: Sequence[PredictedRun], options: argparse.Namespace
) -> tuple[list[dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Measured and predicted tokens/s of every run and round, and the last terms by name."""
    now, deadline = CLOCKS[options.clock], time.monotonic() + 60 * options.minutes
    found: list[dict[str, list[float]]] = [{"measured": [], "predicted": []} for _ in runs]
    terms: dict[str, dict[str, float]] = {}
    for run in runs:  # the first of everything makes threads, kernels and pages
        run.measured(now)
    for done in range(options.rounds):
        began = time.monotonic()
        asked, before = None, None
        for at, run in enumerate(runs):
            if before is None or asked != run.operators:
                asked, before = run.operators, profiled(run.operators, options)
            taken = [run.measured(now) for _ in range(options.repeats)]
            after = profiled(asked, options)
            each = [run.predicted(profile) for profile in (before, after)]
            found[at]["measured"].append(statistics.median(taken))
            mean = 1 / statistics.fmean(1 / one.tokens_per_s for one in each)
            found[at]["predicted"].append(mean)
            terms[run.name] = dict(each[-1].terms)
            before = after
        took = time.monotonic() - began
        print(f"round {done + 1} of {options.rounds}: {took:.0f} s", flush=True)
        if time.monotonic() + took > deadline:
            break
    return found, terms


def profiled(asked: Operators, options: argparse.Namespace) -> OperatorProfile:
    """Those operators of the CPUs that a prediction asks for."""
    return measure_operators(
        seconds=options.seconds,
        rows=asked.rows,
        only=asked.only,
        clock=CLOCKS[options.clock],
    )


def result_of(name: str, found: dict[str, list[float]], terms: dict[str, float]) -> dict[str, Any]:
    """Medians over the rounds; the error is the median of the rounds' own."""
    pairs = list(zip(found["predicted"], found["measured"], strict=True))
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    return {
        "configuration": name,
        "measured_tokens_per_s": statistics.median(found["measured"]),
        "predicted_tokens_per_s": statistics.median(found["predicted"]),
        "error": statistics.median(errors),
        "errors_of_rounds": errors,
        "within_bar": abs(statistics.median(errors)) <= BAR,
        "predicted_terms_s": terms,
    }


def show(console: Console, results: list[dict[str, Any]]) -> None:
    """The table."""
    made = Table(title="Tokens/s: predicted after a profile, and measured")
    made.add_column("configuration", no_wrap=True)
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
    worst = max(abs(result["error"]) for result in results)
    console.print(f"{within} of {len(results)} within {BAR:.0%}, the worst is off by {worst:.1%}")


def save_plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Predicted against measured, with the bar."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 5), layout="constrained")
    for engine in ("transformers", "FlexGen"):
        chosen = [each for each in results if each["configuration"].startswith(engine)]
        measured = [each["measured_tokens_per_s"] for each in chosen]
        predicted = [each["predicted_tokens_per_s"] for each in chosen]
        axes.plot(measured, predicted, "o", label=engine)
    every = [each["measured_tokens_per_s"] for each in results]
    ends = np.array([0.7 * min(every), 1.4 * max(every)])
    axes.plot(ends, ends, color="0.5", lw=1)
    label = f"within {BAR:.0%}"
    axes.fill_between(ends, ends * (1 - BAR), ends * (1 + BAR), color="0.9", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens/s, measured")
    axes.set(ylabel="tokens/s, predicted", title="CPU as accelerator")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse() -> argparse.Namespace:
    """The options; ``--quick`` changes what is not given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round of short runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--minutes", type=float, default=10.0, help="for the rounds; one always is")
    parser.add_argument("--repeats", type=int, help="runs of a configuration in a round")
    parser.add_argument("--seconds", type=float, help="for the layers of a profile")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    usual = {"rounds": 3, "repeats": 3, "seconds": 1.0, "layers": 8, "hidden": 1024}
    short = {"rounds": 1, "repeats": 1, "seconds": 1.0, "layers": 4, "hidden": 1024}
    for name, value in (short if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu counts the waiting of other threads as work: give --threads 1")
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    check_plot(options.plot)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    sizes = Sizes(options.layers, options.hidden)
    with tempfile.TemporaryDirectory(prefix="cxl-offload-bench-") as scratch:
        folder = Path(scratch)
        runs: list[PredictedRun] = []
        runs += transformers_runs(folder / "llama", discover(), sizes, quick=options.quick)
        runs += flexgen_runs(folder / "opt", sizes, quick=options.quick)
        found, terms = rounds_of(runs, options)
    results = [
        result_of(run.name, each, terms[run.name]) for run, each in zip(runs, found, strict=True)
    ]
    show(Console(), results)
    if options.plot is not None:
        save_plot(options.plot, results)
    if options.json is not None:
        settings = {
            name: value for name, value in vars(options).items() if name not in ("json", "plot")
        }
        write_json(options.json, {**describe_machine(), "settings": settings, "results": results})


if __name__ == "__main__":
    main()
