"""Servers of vLLM that take turns with the same prompts, started anew from time to time."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.conditions import Conditions
from benchmarks.measurements import paired_ratio
from benchmarks.neighbour import BESIDE, QUIET, Falls, falls_of
from benchmarks.vllm_cases import KEPT, NONE, TWO, WITHOUT
from benchmarks.vllm_load import Load, LoadRun, run_load
from benchmarks.vllm_server import Server
from cxl_offload.integrations.vllm.serving_report import Samples, parse_metrics, serving_report

BESIDE_SEED = 250
"""Added beside a neighbour: prompts that no server has seen, as in the quiet half of a round."""

WARM_UP_SEED = 700
"""Added for prompts that no server has seen and none is timed with."""

LEARNING_ROUNDS = 2
"""That are not timed: after them the rule of what is stored knows that prompts do not come back."""

LEARNING_SEED = 370
"""Added for prompts of these rounds, which are others than those of any other round or load: the
rule would wait as long as one prompt stayed away that came back."""

SETTLE_S = 0.5
"""In which copies of the server before end."""


@dataclass(slots=True)
class Taken:
    """The turns of one server under one load, in all processes that it was.

    Attributes
    ----------
    runs
        By condition.
    begins, ends
        Its metrics before and after the turns of each process.
    """

    runs: dict[str, list[LoadRun]] = field(default_factory=dict)
    begins: list[Samples] = field(default_factory=list)
    ends: list[Samples] = field(default_factory=list)


def warm_up(port: int, load: Load, seed: int) -> None:
    """One prompt that is not timed: another server ran before, and caches are full of its model.

    A server that ran twice in a row had a tenth more throughput the second time (measured, with a
    cache of 260 MiB that holds the model), which those in the middle of each round never were.
    """
    time.sleep(SETTLE_S)
    run_load(port, replace(load, conversations=1, turns=1, clients=1), seed + WARM_UP_SEED)


def take_turns(
    servers: dict[str, Server],
    load: Load,
    taken: dict[str, Taken],
    *,
    turns: Sequence[int],
    seed: int,
    conditions: Conditions,
) -> None:
    """Adds the runs of some rounds; another server begins in each.

    ``seed`` is the first of a thousand, which no other load has.
    """
    for server in servers.values():  # none meets a load for the first time while timed
        for learning in range(LEARNING_ROUNDS):
            run_load(server.port, load, seed + LEARNING_SEED + learning)
    for name, server in servers.items():
        taken.setdefault(name, Taken()).begins.append(parse_metrics(server.metrics()))
    for turn in turns:
        first = turn % len(servers)
        names = [*servers][first:] + [*servers][:first]
        for condition in conditions.of_round(turn):
            fresh = seed + turn + (BESIDE_SEED if condition == BESIDE else 0)
            for name in names:
                warm_up(servers[name].port, load, fresh)
                run = run_load(servers[name].port, load, fresh)
                taken[name].runs.setdefault(condition, []).append(run)
    for name, server in servers.items():
        taken[name].ends.append(parse_metrics(server.metrics()))


def results_of(taken: dict[str, Taken], load: Load) -> dict[str, dict[str, Any]]:
    """Of every server: its times, what its tiers did, and its throughput over none."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in taken.items():
        found[name] = times_of(one.runs, load)
        report = serving_report(added(one.ends), added(one.begins))
        found[name] |= {
            "hit_rate": report.hit_rate,
            "host_hit_rate": report.host_hit_rate,
            "tier_bytes": report.tier_bytes,
            "stored_bytes": report.stored_bytes,
            "loaded_bytes": report.loaded_bytes,
        }
    if TWO in taken and KEPT in taken:
        ratio = paired_ratio(found[TWO]["seconds"], found[KEPT]["seconds"])
        found[KEPT]["over_two_tiers"] = asdict(ratio)
    for name in taken:
        # seconds without over seconds with: throughput gained
        ratio = paired_ratio(found[NONE]["seconds"], found[name]["seconds"])
        found[name]["throughput_ratio"] = asdict(ratio)
    return found


def added(readings: Sequence[Samples]) -> Samples:
    """One reading of several servers as if they were one: all that is asked of it are counters."""
    total: Counter[Any] = Counter()
    for each in readings:
        total.update(each.values)  # type: ignore[arg-type]  # numbers of any kind
    return Samples(dict(total), readings[-1].read_at_s)


def times_of(runs: dict[str, list[LoadRun]], load: Load) -> dict[str, Any]:
    """Of one server: what is told is of the quiet runs, those beside a neighbour stand apart."""
    first = [wait for run in runs[QUIET] for wait in run.first_token_s]
    seconds = {condition: [run.seconds for run in each] for condition, each in runs.items()}
    found: dict[str, Any] = {
        "seconds": seconds[QUIET],
        "requests_per_s": load.conversations * load.turns / statistics.median(seconds[QUIET]),
        "first_token_p50_s": float(np.percentile(first, 50)),
        "first_token_p99_s": float(np.percentile(first, 99)),
    }
    return found | ({"seconds_beside": seconds[BESIDE]} if BESIDE in seconds else {})


def falls(results: dict[str, dict[str, Any]]) -> dict[str, Falls]:
    """Of every load and server that offloads."""

    def seconds(found: dict[str, Any]) -> dict[str, list[float]]:
        return {QUIET: found["seconds"], BESIDE: found["seconds_beside"]}

    return {
        f"{load}: {name}": falls_of(seconds(servers[NONE]), seconds(found))
        for load, servers in results.items()
        for name, found in servers.items()
        if name not in WITHOUT
    }
