"""KV offloading of a real ``vllm serve``: none, one tier, two, two that are kept; on CPU.

Conversations of several turns over a shared prefix, whose KV is several times what the KV cache
holds; and prompts that never come back, where offloading can only lose. All servers are up at
once and take turns, round by round, with the same prompts; ratios are of paired rounds. Before
that, answers are compared, one request at a time. The copy worker's bandwidth is timed inside C++,
over the blocks of one such prompt, against a memcpy of each. At last the servers of two tiers are
stopped and started again, and get the prompts that they had before. Everything is measured.

Run it with the Python of an environment that has vLLM (``make test-vllm`` makes one):

    .venv-vllm/bin/python -m benchmarks.bench_vllm_kv [--rounds N] [--json FILE] [--plot FILE]

``--plot`` needs matplotlib; ``--from FILE`` draws and prints what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import check_plot, describe_machine, paired_ratio, write_json
from benchmarks.vllm_load import Load, LoadRun, ask, run_load
from benchmarks.vllm_restart import measure_restarts
from benchmarks.vllm_server import Server, make_model, plugin_folder
from cxl_offload.integrations.vllm.serving_report import parse_metrics, serving_report
from cxl_offload.kept import kept_path

BAR_THROUGHPUT, BAR_COPY, BAR_KEPT, BAR_NEVER = 1.5, 0.8, 0.97, 0.98

LAYERS, HIDDEN, BLOCK_TOKENS = 8, 768, 32
BYTES_PER_TOKEN = LAYERS * 2 * (HIDDEN // 128) * 64 * 2
CACHE_BLOCKS = 128
CACHE_TOKENS = CACHE_BLOCKS * BLOCK_TOKENS

REUSE = "conversations, shared prefix"
NEVER = "prompts that never come back"
LOADS = {
    REUSE: Load(
        conversations=12,
        turns=3,
        shared=256,
        document=1024,
        message=64,
        answer=32,
        generate=8,
        clients=2,
    ),
    NEVER: Load(
        conversations=12,
        turns=1,
        shared=0,
        document=1280,
        message=64,
        answer=0,
        generate=8,
        clients=2,
    ),
}
NONE, ONE, TWO, KEPT = "no offload", "one tier", "two tiers", "two tiers, kept"
KEPT_NAME = f"benchmark-{os.getpid()}"


def tiers_of(name: str, working_set_bytes: int) -> dict[str, Any] | None:
    """Options of the connector; None for no offload."""
    if name == NONE:
        return None
    extra: dict[str, Any] = {"spec_name": "cxl", "policy": "bind:0"}
    if name == ONE:
        return extra | {"cpu_bytes_to_use": 4 * working_set_bytes}
    # the hot tier holds a third of what comes back, so that most is brought from the cold one
    cold: dict[str, Any] = {"bytes": 4 * working_set_bytes, "policy": "bind:0"}
    if name == KEPT:
        cold["persist"] = KEPT_NAME
    return extra | {"cpu_bytes_to_use": working_set_bytes // 3, "cold": cold}


def flags_of(name: str, working_set_bytes: int) -> list[str]:
    flags = ["--enforce-eager", "--dtype", "bfloat16", "--max-num-seqs", "4"]
    flags += ["--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(CACHE_BLOCKS)]
    extra = tiers_of(name, working_set_bytes)
    if extra is not None:
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        flags += ["--kv-transfer-config", json.dumps(connector)]
    return flags


def check_answers(servers: dict[str, Server], load: Load) -> dict[str, Any]:
    """The same prompts, alone, twice: the second time from the tiers. All answers must be equal."""
    few = replace(load, conversations=6, turns=1, generate=16)
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
        if name != NONE and not report.loaded_bytes:
            raise SystemExit(f"{name}: nothing was loaded from a tier, so nothing is compared")
        if not all(equal):
            raise SystemExit(f"{name}: {sum(equal)} of {len(equal)} answers are as without offload")
    return found


def measure(
    servers: dict[str, Server], load: Load, rounds: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Runs that take turns; for every server its runs, and its report over all of them."""
    runs: dict[str, list[LoadRun]] = {name: [] for name in servers}
    before = {name: parse_metrics(server.metrics()) for name, server in servers.items()}
    for turn in range(rounds):
        names = list(servers) if turn % 2 else list(reversed(servers))
        for name in names:
            runs[name].append(run_load(servers[name].port, load, seed + turn))
    found: dict[str, dict[str, Any]] = {}
    for name, server in servers.items():
        report = serving_report(parse_metrics(server.metrics()), before[name])
        first = [wait for run in runs[name] for wait in run.first_token_s]
        requests = load.conversations * load.turns
        found[name] = {
            "seconds": [run.seconds for run in runs[name]],
            "requests_per_s": requests / statistics.median(run.seconds for run in runs[name]),
            "first_token_p50_s": float(np.percentile(first, 50)),
            "first_token_p99_s": float(np.percentile(first, 99)),
            "hit_rate": report.hit_rate,
            "host_hit_rate": report.host_hit_rate,
            "tier_bytes": report.tier_bytes,
            "stored_bytes": report.stored_bytes,
            "loaded_bytes": report.loaded_bytes,
        }
    if TWO in servers and KEPT in servers:
        ratio = paired_ratio(found[TWO]["seconds"], found[KEPT]["seconds"])
        found[KEPT]["over_two_tiers"] = asdict(ratio)
    for name in servers:
        # seconds without over seconds with: throughput gained
        ratio = paired_ratio(found[NONE]["seconds"], found[name]["seconds"])
        found[name]["throughput_ratio"] = asdict(ratio)
    return found


def copy_bandwidth(load: Load) -> list[dict[str, Any]]:
    """The copier of the worker over the blocks of one prompt, and over blocks of other sizes."""
    from cxl_offload.memory import Session
    from cxl_offload.transfer import HostCopier

    session, room = Session.linux(), 512 << 20
    ends = [session.allocate(room, "bind:0") for _ in range(2)]
    for end in ends:
        np.from_dlpack(end)[:] = 1  # type: ignore[arg-type]
    prompt_blocks = load.longest_prompt // BLOCK_TOKENS
    page = BYTES_PER_TOKEN * BLOCK_TOKENS // LAYERS
    cases = [(page, prompt_blocks * LAYERS)]
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


def run_benchmark(rounds: int, restarts: int, names: list[str], folder: Path) -> dict[str, Any]:
    model = folder / "model"
    make_model(model, layers=LAYERS, hidden=HIDDEN)
    plugin = plugin_folder(folder / "plugin")
    working_set = LOADS[REUSE].working_set_tokens * BYTES_PER_TOKEN
    console = Console(stderr=True)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "model": {"layers": LAYERS, "hidden": HIDDEN, "kv_bytes_per_token": BYTES_PER_TOKEN},
        "cache_tokens": CACHE_TOKENS,
        "working_set_bytes": working_set,
        "loads": {name: load.describe() for name, load in LOADS.items()},
        "copies": copy_bandwidth(LOADS[REUSE]),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(kept_path(KEPT_NAME).unlink, missing_ok=True)

        def start(name: str) -> Server:
            console.print(f"starting vllm serve: {name}")
            log = folder / f"{name.replace(' ', '-')}.log"
            server = Server(model, flags_of(name, working_set), log=log, plugin=plugin)
            stack.enter_context(server)
            server.wait_until_up()
            return server

        servers = {name: start(name) for name in names}
        console.print("comparing answers")
        document["answers"] = check_answers(servers, LOADS[REUSE])
        document["results"] = {}
        for at, (name, load) in enumerate(LOADS.items()):
            console.print(f"measuring: {name}")
            run_load(servers[NONE].port, load, 99)  # warm
            document["results"][name] = measure(servers, load, rounds, 1000 * at)
        if restarts and TWO in names and KEPT in names:
            console.print("measuring: after a restart")
            document["restarts"] = measure_restarts(
                servers, start, (TWO, KEPT), LOADS[REUSE], restarts
            )
    document["machine"]["load_average_after"] = describe_machine()["load_average"]
    return document


def print_tables(document: dict[str, Any], console: Console) -> None:
    cache, kv = document["cache_tokens"], document["model"]["kv_bytes_per_token"]
    machine = document["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['date']}, commit "
        f"{machine['commit']}, load {machine['load_average'][0]:.1f}; measured"
    )
    for name, results in document["results"].items():
        load = document["loads"][name]
        console.print(
            f"\n{name}: {load['conversations']} x {load['turns']} turns, prompts of up to "
            f"{load['longest_prompt']} tokens ({load['reusable_share']:.0%} of them seen before), "
            f"{load['generate']} generated, {load['clients']} clients; working set "
            f"{load['working_set_tokens'] * kv / 2**20:.0f} MiB, "
            f"KV cache {cache * kv / 2**20:.0f} MiB"
        )
        console.print(load_table(results))
        for server, found in results.items():
            for tier, events in found["tier_bytes"].items():
                told = ", ".join(f"{event} {n / 2**20:.0f} MiB" for event, n in events.items())
                console.print(f"  {server}, {tier}: {told}")
    if "restarts" in document:
        print_restarts(document["restarts"], console)
    console.print(copies_table(document["copies"]))


def load_table(results: dict[str, Any]) -> Table:
    """A row for each server under one load."""
    columns = ("requests/s", "ratio", "first token p50", "p99", "hit rate", "from tiers")
    table = Table()
    table.add_column("server")
    for column in columns:
        table.add_column(column, justify="right")
    for server, found in results.items():
        ratio = found["throughput_ratio"]
        table.add_row(
            server,
            f"{found['requests_per_s']:.2f}",
            f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})",
            f"{found['first_token_p50_s'] * 1e3:.0f} ms",
            f"{found['first_token_p99_s'] * 1e3:.0f} ms",
            f"{found['hit_rate']:.0%}",
            f"{found['host_hit_rate']:.0%}",
        )
    return table


def copies_table(copies: list[dict[str, Any]]) -> Table:
    """A row for each number and size of blocks."""
    table = Table(title="Copy worker, timed inside C++")
    for column in ("blocks", "worker GB/s", "memcpy GB/s", "ratio"):
        table.add_column(column, justify="right")
    for row in copies:
        ratio = row["ratio"]
        mark = " (a prompt of this load)" if row["of_this_load"] else ""
        table.add_row(
            f"{row['blocks']} x {row['block_bytes'] // 1024} KiB{mark}",
            f"{row['worker_bytes_per_s'] / 1e9:.1f}",
            f"{row['memcpy_bytes_per_s'] / 1e9:.1f}",
            f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})",
        )
    return table


def print_restarts(restarts: dict[str, Any], console: Console) -> None:
    table = Table(title="Prompts from before a restart")
    for column in ("server", "requests/s", "first token p50", "p99"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name in (TWO, KEPT):
        found = restarts[name]
        table.add_row(
            name,
            f"{found['requests_per_s']:.2f}",
            f"{found['first_token_p50_s'] * 1e3:.0f} ms",
            f"{found['first_token_p99_s'] * 1e3:.0f} ms",
        )
    console.print(table)
    ratio = restarts["throughput_ratio"]
    console.print(
        f"  kept over not kept: {ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
    )


def bars_missed(document: dict[str, Any]) -> list[str]:
    """What this run does not reach."""
    missed = []
    for server, found in document["results"][REUSE].items():
        gained = found["throughput_ratio"]["median"]
        if server != NONE and gained < BAR_THROUGHPUT:
            missed.append(f"{server}: {gained:.2f}x the throughput, the bar is {BAR_THROUGHPUT}")
        beside = found.get("over_two_tiers")
        if beside is not None and beside["median"] < BAR_KEPT:
            missed.append(f"{server}: {beside['median']:.2f} of two tiers, the bar is {BAR_KEPT}")
    for server, found in document["results"][NEVER].items():
        kept = found["throughput_ratio"]["median"]
        if kept < BAR_NEVER:
            missed.append(f"{server}: {kept:.2f} of no offload for {NEVER}, the bar is {BAR_NEVER}")
    for row in document["copies"]:
        if row["of_this_load"] and row["ratio"]["median"] < BAR_COPY:
            missed.append(f"copy worker: {row['ratio']['median']:.2f} of memcpy, bar {BAR_COPY}")
    return missed


def plot(document: dict[str, Any], path: Path) -> None:
    """Throughput and time to the first token of every server, by load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    width = 0.8 / max(len(found) for found in document["results"].values())
    for at, server in enumerate(document["results"][REUSE]):
        rows = [found[server] for found in document["results"].values()]
        places = [load + at * width for load in range(len(rows))]
        ratios = [row["throughput_ratio"] for row in rows]
        middles = [ratio["median"] for ratio in ratios]
        spread = [
            [m - ratio["low"] for m, ratio in zip(middles, ratios, strict=True)],
            [ratio["high"] - m for m, ratio in zip(middles, ratios, strict=True)],
        ]
        axes[0].bar(places, middles, width, yerr=spread, capsize=3, label=server)
        axes[1].bar(places, [row["first_token_p50_s"] for row in rows], width, label=server)
    for axis, title in zip(
        axes, ("throughput over no offload", "first token, median (s)"), strict=True
    ):
        axis.set_title(title)
        names = [name.replace(" ", "\n", 1) for name in document["results"]]
        axis.set_xticks([width, 1 + width], names)
        axis.grid(axis="y", alpha=0.3)
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[0].legend()
    machine = document["machine"]
    figure.suptitle(f"measured, {machine['cores']} cores of {machine['processor']}", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of every load")
    parser.add_argument("--restarts", type=int, default=3, help="of the servers of two tiers")
    parser.add_argument("--servers", nargs="+", default=[NONE, ONE, TWO, KEPT])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="of an earlier run")
    parser.add_argument("--logs", type=Path, help="keep the servers' output there")
    args = parser.parse_args()
    check_plot(args.plot)
    if args.source is not None:
        document = json.loads(args.source.read_text())
    else:
        if args.servers[0] != NONE or not set(args.servers) <= {NONE, ONE, TWO, KEPT}:
            parser.error(f"--servers: {NONE!r} first, then any of {ONE!r}, {TWO!r} and {KEPT!r}")
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.logs or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            document = run_benchmark(args.rounds, args.restarts, args.servers, folder)
    print_tables(document, Console())
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
