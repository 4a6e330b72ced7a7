"""KV offloading of a real ``vllm serve``: none, one tier, two, two that are kept; on CPU.

Two servers have none: what they differ by tells nothing of offloading, and so that much of what the
others differ by does not either. One process of vLLM is faster than another by more than the bar
of 2 %, so all servers are started anew ``--starts`` times, each with its share of the rounds.

Conversations of several turns over a shared prefix, whose KV is several times what the KV cache
holds; and prompts that never come back, where offloading can only lose. All servers are up at
once and take turns, round by round, with the same prompts, each after one that is not timed; ratios
are of paired rounds. Before that, answers are compared, one request at a time. The copy worker's
bandwidth is timed inside C++, over the blocks of one such prompt, against a memcpy of each. At last
the servers of two tiers are stopped and started again, and get the prompts that they had before.
Everything is measured.

Run it with the Python of an environment that has vLLM (``make test-vllm`` makes one):

    .venv-vllm/bin/python -m benchmarks.bench_vllm_kv [--rounds N] [--json FILE] [--plot FILE]

``--grid`` runs prompts that never come back instead: 1, 4, 8 and 32 at once, of 32, 128 and
512 tokens; the bar is 0.98 of no offload in every case. Bars are judged by the lower ends of the
intervals. ``--neighbour`` also runs every load beside a process that keeps a CPU and the memory
busy (neighbour.py), in every round once, and tells how much throughput is lost without offload and
with.
``--dtype float32`` is for processors without arithmetic for bfloat16, whose prompts vLLM's own
kernels take several times as long for.
``--plot`` needs matplotlib; ``--from FILE`` draws and prints what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.conditions import add_options, conditions_of
from benchmarks.measurements import check_plot, describe_machine, paired_ratio, write_json
from benchmarks.neighbour import falls_table
from benchmarks.vllm_cases import (
    AGAIN,
    BLOCK_TOKENS,
    BYTES_OF,
    GRID,
    HIDDEN,
    KEPT,
    KEPT_NAME,
    LOADS,
    NONE,
    ONE,
    REUSE,
    TWO,
    TWO_LOADS,
    WITHOUT,
    Served,
    Setting,
    flags_of,
)
from benchmarks.vllm_load import Load, ask
from benchmarks.vllm_report import bars_missed, plot, print_tables
from benchmarks.vllm_restart import measure_restarts
from benchmarks.vllm_server import Server, make_model, plugin_folder
from benchmarks.vllm_turns import Taken, falls, results_of, take_turns
from cxl_offload.integrations.vllm.serving_report import parse_metrics, serving_report
from cxl_offload.kept import kept_path

LEAST_EQUAL = 0.95
"""Of answers. From a tier only the end of a prompt is computed, so products of bfloat16 are rounded
in another order, and two tokens of random weights may be equally likely: one of 52 was."""


def check_answers(servers: dict[str, Server], load: Load, conversations: int) -> dict[str, Any]:
    """The same prompts, alone, twice: the second time from the tiers. Answers must be equal."""
    few = replace(load, conversations=conversations, turns=1, generate=16)
    prompts = few.rounds(seed=10_000)[0]
    expected: list[tuple[int, ...]] = []
    found: dict[str, Any] = {}
    for name, server in servers.items():
        before = parse_metrics(server.metrics())
        first = [ask(server.port, prompt, few.generate, 120).tokens for prompt in prompts]
        again = [ask(server.port, prompt, few.generate, 120).tokens for prompt in prompts]
        expected = expected or first
        equal = [a == b for a, b in zip(first + again, expected * 2, strict=True)]
        report = serving_report(parse_metrics(server.metrics()), before)
        found[name] = {
            "equal": sum(equal),
            "of": len(equal),
            "loaded_bytes": report.loaded_bytes,
        }
        if name not in WITHOUT and not report.loaded_bytes:
            raise SystemExit(f"{name}: nothing was loaded from a tier, so nothing is compared")
        if sum(equal) < LEAST_EQUAL * len(equal):
            raise SystemExit(f"{name}: {sum(equal)} of {len(equal)} answers are as without offload")
    return found


def copy_bandwidth(load: Load, served: Served) -> list[dict[str, Any]]:
    """The copier of the worker over the blocks of one prompt, and over blocks of other sizes."""
    from cxl_offload.memory import Session
    from cxl_offload.transfer import HostCopier

    session, room = Session.linux(), 512 << 20
    ends = [session.allocate(room, "bind:0") for _ in range(2)]
    for end in ends:
        np.from_dlpack(end)[:] = 1  # type: ignore[arg-type]
    prompt_blocks = load.longest_prompt // BLOCK_TOKENS
    page = served.layer_token_bytes * BLOCK_TOKENS
    cases = [(page, prompt_blocks * served.layers)]
    cases += [(size, (64 << 20) // size) for size in (16 << 10, 64 << 10, 256 << 10, 1 << 20)]
    copier, random = HostCopier(), np.random.default_rng(0)
    rows = []
    for block, count in cases:
        lists = [
            (end.address + random.permutation(room // block) * block).astype(np.uint64)
            for end in ends
        ]
        own, plain = copier.time_blocks(
            targets=lists[0], sources=lists[1], sizes=block, job=count, rounds=31
        )
        ratio = paired_ratio(plain, own)
        rows.append(
            {
                "block_bytes": block,
                "blocks": count,
                "of_this_load": (block, count) == cases[0],
                "worker_bytes_per_s": block * count / statistics.median(own),
                "memcpy_bytes_per_s": block * count / statistics.median(plain),
                "ratio": asdict(ratio),
            }
        )
    return rows


def run_benchmark(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = folder / "model"
    served = Served(args.layers, args.dtype)
    make_model(model, layers=served.layers, hidden=HIDDEN)
    plugin = plugin_folder(folder / "plugin")
    setting = GRID if args.grid else TWO_LOADS
    console = Console(stderr=True)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "model": served.describe(),
        "cache_tokens": setting.cache_tokens,
        "working_set_bytes": setting.tier_tokens * served.token_bytes,
        "loads": {name: load.describe() for name, load in setting.loads.items()},
        "copies": [] if args.grid else copy_bandwidth(LOADS[REUSE], served),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(kept_path(KEPT_NAME).unlink, missing_ok=True)

        def start(name: str) -> Server:
            console.print(f"starting vllm serve: {name}")
            log = folder / f"{name.replace(' ', '-')}.log"
            server = Server(model, flags_of(name, setting, served), log=log, plugin=plugin)
            stack.enter_context(server)
            server.wait_until_up()
            return server

        servers = {name: start(name) for name in args.servers}
        console.print("comparing answers")
        document["answers"] = check_answers(servers, LOADS[REUSE], setting.compared)
        document |= measure_loads(servers, start, setting, args, console)
        if args.restarts and not args.grid and {TWO, KEPT} <= servers.keys():
            console.print("measuring: after a restart")
            document["restarts"] = measure_restarts(
                servers, start, (TWO, KEPT), LOADS[REUSE], args.restarts
            )
    document["machine"]["load_average_after"] = describe_machine()["load_average"]
    return document


def measure_loads(
    servers: dict[str, Server],
    start: Callable[[str], Server],
    setting: Setting,
    args: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """The results of all loads, and what a neighbour costs where one is asked for.

    ``servers`` are up; later processes take their place.
    """
    taken: dict[str, dict[str, Taken]] = {name: {} for name in setting.loads}
    with conditions_of(args) as conditions:
        for number, turns in enumerate(np.array_split(range(args.rounds), args.starts)):
            if number:
                console.print("all servers are started anew")
                for name, server in servers.items():
                    server.stop()
                    servers[name] = start(name)
            for at, (name, load) in enumerate(setting.loads.items()):
                console.print(f"measuring: {name}")
                take_turns(
                    servers,
                    load,
                    taken[name],
                    turns=turns.tolist(),
                    seed=1000 * at,
                    conditions=conditions,
                )
    results = {name: results_of(taken[name], load) for name, load in setting.loads.items()}
    return {"results": results, **conditions.document(lambda: falls(results))}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every load")
    parser.add_argument("--starts", type=int, default=5, help="of all servers, among the rounds")
    parser.add_argument("--restarts", type=int, default=3, help="of the servers of two tiers")
    parser.add_argument("--layers", type=int, default=Served().layers, help="of the model")
    parser.add_argument("--dtype", choices=tuple(BYTES_OF), default="bfloat16")
    parser.add_argument("--servers", nargs="+", default=[*WITHOUT, ONE, TWO, KEPT])
    add_options(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="of an earlier run")
    parser.add_argument("--logs", type=Path, help="keep the servers' output there")
    args = parser.parse_args()
    others = (AGAIN, ONE, TWO, KEPT)
    if args.servers[0] != NONE or not set(args.servers[1:]) <= {*others}:
        parser.error(f"--servers: {NONE!r} first, then any of {', '.join(map(repr, others))}")
    if not 1 <= args.starts <= args.rounds:
        parser.error("--starts: 1 to as many as rounds")
    if args.grid and args.plot:
        parser.error("--plot: draws the two loads; leave out --grid")
    return args


def _end(number: int, frame: object) -> None:
    """Ends the servers too, which takes seconds in which a second signal would leave them."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _end)
    args = parse()
    check_plot(args.plot)
    if args.source is not None:
        document = json.loads(args.source.read_text())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.logs or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            document = run_benchmark(args, folder)
    print_tables(document, Console())
    if "neighbour" in document:
        print(falls_table(falls(document["results"])))
    if args.json is not None:
        write_json(args.json, document)
    if args.plot is not None:
        plot(document, args.plot)
    missed = bars_missed(document)
    for line in missed:
        print(f"missed: {line}")
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
