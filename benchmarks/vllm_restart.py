"""A server that is stopped and started again: with chunks kept from before, and without."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.measurements import paired_ratio
from benchmarks.vllm_load import Load, run_load
from benchmarks.vllm_server import Server

WARM_SEED, FIRST_SEED = 99, 500


def measure_restarts(
    servers: dict[str, Server],
    start: Callable[[str], Server],
    names: Sequence[str],
    load: Load,
    turns: int,
) -> dict[str, Any]:
    """Prompts of a server that saw them before it was started again.

    Parameters
    ----------
    servers
        Up; those of these names are replaced by new ones.
    start
        Starts the server of a name and waits for it.
    names
        The one that keeps nothing, and the one that does.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, list[float]] = {name: [] for name in names}
    few = replace(load, conversations=2, turns=1)
    for turn in range(turns):
        for name in names if turn % 2 else reversed(names):
            run_load(servers[name].port, load, FIRST_SEED + turn)
            servers[name].stop()
            servers[name] = start(name)
            run_load(servers[name].port, few, WARM_SEED)
            run = run_load(servers[name].port, load, FIRST_SEED + turn)
            seconds[name].append(run.seconds)
            first[name] += run.first_token_s
    cold, kept = names
    requests = load.conversations * load.turns
    found: dict[str, Any] = {
        name: {
            "seconds": seconds[name],
            "requests_per_s": requests / statistics.median(seconds[name]),
            "first_token_p50_s": float(np.percentile(first[name], 50)),
            "first_token_p99_s": float(np.percentile(first[name], 99)),
        }
        for name in names
    }
    return found | {"throughput_ratio": asdict(paired_ratio(seconds[cold], seconds[kept]))}
