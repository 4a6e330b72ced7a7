"""Tuners against each other on simulated workloads, and what watching a step costs.

Every step time is *simulated* (:class:`cxl_offload.sim.step_time.TwoTierStep`, which knows nothing
of the tuners' curves), with normal noise; only the cost of watching a step is *measured*.

    python -m benchmarks.bench_tune [--workloads 200] [--noise 0.05] [--plot FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurements import check_plot
from benchmarks.tune_bars import print_bars
from benchmarks.tune_cases import (
    Case,
    pairs_of_phases,
    published_cases,
    published_tiers,
    random_case,
)
from benchmarks.tune_experts import measured_requests, peers, run_most_used, zipf_mixtral
from benchmarks.tune_phases import Pair, gains, recovered
from benchmarks.tune_plot import plot
from cxl_offload.tune import (
    Climb,
    Decision,
    ModelTuner,
    PublishedCaption,
    StepSamples,
    Window,
)
from cxl_offload.tune.curves import SHARES

DECISIONS = 15
STEPS = 20
CLOSE = 0.03


def score_experts(exponent: float, tokens: int) -> list[dict[str, Any]]:
    """The most used experts near, on every published machine against the oracle and the peers."""
    asked = measured_requests(zipf_mixtral(exponent, seed=1), tokens, seed=2)
    others = peers(asked, seed=3)
    ours = run_most_used(asked)
    rows = []
    for tiers in published_tiers():
        rates = (tiers.rate, tiers.rate * tiers.ratios.bandwidth)
        took = ours.seconds(*rates)
        rows.append(
            {
                "machine": tiers.name,
                "exponent": exponent,
                "near_hits": ours.near / (ours.near + ours.far),
                "over_oracle": took / others["oracle"].seconds(*rates) - 1,
                "moved_of_traffic": ours.moved_of_all,
                "faster_than": {
                    name: one.seconds(*rates) / took - 1
                    for name, one in others.items()
                    if name != "oracle"
                },
            }
        )
    return rows


def print_experts(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["faster_than"])
    print("\nExperts of a tiny Mixtral, a quarter near; requests measured, times simulated")
    print("| machine, far tier | Zipf | near hits | slower than the oracle | moved of traffic | "
          + " | ".join(f"faster than {name}" for name in names) + " |")  # fmt: skip
    print("|---|" + "---:|" * (4 + len(names)))
    for row in rows:
        print(
            f"| {row['machine']} | {row['exponent']} | {row['near_hits']:.1%} | "
            f"{row['over_oracle']:.1%} | {row['moved_of_traffic']:.2%} | "
            + " | ".join(f"{row['faster_than'][name]:.0%}" for name in names)
            + " |"
        )


class RandomSearch:
    """A peer: tries random shares, then stays at the best one seen."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._seen: dict[float, float] = {}
        self._left = DECISIONS - 2
        self.share = 0.0

    def decide(self, window: Window) -> Decision:
        self._seen[self.share] = min(window.mean_s, self._seen.get(self.share, math.inf))
        self._left -= 1
        tried = float(self._draw.choice(SHARES))
        self.share = tried if self._left > 0 else min(self._seen, key=self._seen.__getitem__)
        return Decision(self.share, "random")


def tuners(case: Case, seed: int) -> dict[str, Callable[[], Any]]:
    return {
        "model": lambda: ModelTuner(case.ratios),
        "climb": Climb,
        "caption": PublishedCaption,
        "random search": lambda: RandomSearch(seed),
    }


def run(
    case: Case, tuner: Any, truth: Callable[[float], float], seed: int, noise: float
) -> list[float]:
    """The share after each decision."""
    draw = np.random.default_rng(seed)
    shares = []
    for at in range(DECISIONS):
        slow = 1.0 + case.drift * at / DECISIONS
        times = truth(tuner.share) * slow * np.maximum(1 + noise * draw.standard_normal(STEPS), 0.2)
        if case.tails:
            times = times * np.where(draw.random(STEPS) < 0.05, 2.0, 1.0)
        shares.append(tuner.decide(Window.of(times)).share)
    return shares


def first_settled(times: list[float], best: float) -> int:
    """Decisions after which the step stays within 3 % of the best; one more than all if never."""
    at = len(times)
    while at and times[at - 1] <= (1 + CLOSE) * best:
        at -= 1
    return at + 1


Losses = dict[str, list[list[float]]]
"""Tuner to the loss of each workload by decision, as a fraction of the best step."""


def score(
    cases: list[Case], noise: float, losses: Losses | None = None
) -> dict[str, dict[str, Any]]:
    """Every tuner's row of the table; ``losses`` gets what the picture shows."""
    rows: dict[str, dict[str, list[float]]] = {}
    for number, case in enumerate(cases):
        known = dict(zip(SHARES, case.step.curve(SHARES).tolist(), strict=True))

        def truth(share: float, known: dict[float, float] = known, case: Case = case) -> float:
            if share not in known:
                known[share] = case.step.seconds(share)
            return known[share]

        best, near = min(truth(share) for share in SHARES), truth(0.0)
        fixed = case.ratios.bandwidth / (1 + case.ratios.bandwidth)
        paths = {
            name: run(case, make(), truth, 7919 + number, noise)
            for name, make in tuners(case, number).items()
        }
        paths |= {"first touch": [0.0], "static 50 %": [0.5], "static by bandwidth": [fixed]}
        for name, path in paths.items():
            row = rows.setdefault(name, {"regret": [], "decisions": [], "worse": [], "zero": []})
            times = [truth(share) for share in path]
            if losses is not None:
                losses.setdefault(name, []).append([one / best - 1 for one in times])
            row["regret"].append(times[-1] / best - 1)
            row["decisions"].append(first_settled(times, best))
            row["worse"].append(float(times[-1] > 1.02 * near))
            if near <= best * (1 + 1e-9):
                row["zero"].append(float(path[-1] == 0.0))
    return {name: summary(row, len(cases)) for name, row in rows.items()}


def summary(row: dict[str, list[float]], cases: int) -> dict[str, Any]:
    return {
        "within_3_percent": sum(one <= CLOSE for one in row["regret"]) / cases,
        "mean_regret": statistics.fmean(row["regret"]),
        "worst_regret": max(row["regret"]),
        "median_decisions": statistics.median(row["decisions"]),
        "mean_decisions": statistics.fmean(row["decisions"]),
        "over_2_percent_worse_than_first_touch": sum(row["worse"]) / cases,
        "back_to_zero_where_near_is_best": statistics.fmean(row["zero"]) if row["zero"] else None,
    }


def watching_s(steps: int = 200_000) -> float:
    """Seconds that collecting one step time takes, measured on this machine."""
    collector = StepSamples(steps=steps + 1, warm_up=0)
    begin = time.perf_counter()
    for _ in range(steps):
        collector.add(time.perf_counter() - begin + 1.0)
    return (time.perf_counter() - begin) / steps


def deciding_s(decisions: int = 20) -> float:
    """Seconds that a decision of the model takes, on this machine: the median of a run."""
    case = random_case(0)
    tuner, draw = ModelTuner(case.ratios), np.random.default_rng(0)
    took = []
    for _ in range(decisions):
        times = case.step.seconds(tuner.share) * (1 + 0.05 * draw.standard_normal(STEPS))
        begin = time.perf_counter()
        tuner.decide(Window.of(times))
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def print_table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    print(f"\n{title}")
    print("| tuner | within 3 % | mean regret | worst | decisions, median (mean) | "
          "> 2 % worse than first touch | back to 0 |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, one in rows.items():
        zero = one["back_to_zero_where_near_is_best"]
        print(
            f"| {name} | {one['within_3_percent']:.1%} | {one['mean_regret']:.2%} | "
            f"{one['worst_regret']:.1%} | {one['median_decisions']:.0f} "
            f"({one['mean_decisions']:.1f}) | "
            f"{one['over_2_percent_worse_than_first_touch']:.1%} | "
            f"{'-' if zero is None else f'{zero:.0%}'} |"
        )


def print_phase_change(rows: dict[str, Any]) -> None:
    print("\nAfter a change of the workload, simulated:")
    for name, one in rows.items():
        print(f"{name}: {one['recovered_within_10']:.1%} within 3 % of the new best after 10 "
              f"decisions, {one['mean_decisions']:.1f} decisions in the mean")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first random workload")
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--tokens", type=int, default=6000, help="of the tiny Mixtral")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    check_plot(options.plot)
    seeds = range(options.first, options.first + options.workloads)
    random_cases = [random_case(seed) for seed in seeds]
    published = published_cases()
    pairs = pairs_of_phases(options.workloads, first=options.first)
    makers: dict[str, Callable[[Pair, int], Any]] = {
        "model": lambda pair, _: ModelTuner(pair.ratios),
        "climb": lambda pair, _: Climb(),
        "caption": lambda pair, _: PublishedCaption(),
    }
    of_random: Losses = {}
    of_published: Losses = {}
    result: dict[str, Any] = {
        "random": score(random_cases, options.noise, of_random),
        "published": score(published, options.noise, of_published),
        "phase_change": {name: recovered(pairs, make, options.noise)
                         for name, make in makers.items()},
        "phase_shares": gains(pairs, options.noise),
        "experts": [
            row for exponent in (0.6, 1.2) for row in score_experts(exponent, options.tokens)
        ],
        "watching_a_step_s": watching_s(),
        "deciding_s": deciding_s(),
    }  # fmt: skip
    print_table(f"{len(random_cases)} random workloads, simulated, {options.noise:.0%} noise, "
                f"{STEPS} steps a decision, {DECISIONS} decisions", result["random"])  # fmt: skip
    print_table(f"{len(published)} workloads on published machines, simulated", result["published"])
    print_phase_change(result["phase_change"])
    print_experts(result["experts"])
    cost = result["watching_a_step_s"]
    print(f"\nwatching a step: {cost * 1e6:.2f} us measured, {cost / 0.01:.4%} of a step of 10 ms")
    print(f"a decision: {result['deciding_s'] * 1e3:.1f} ms measured, one in {STEPS} steps")
    print_bars(result)
    if options.plot:
        names = [case.name for case in published]
        plot(of_random, of_published, names, noise=options.noise, file=options.plot)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
