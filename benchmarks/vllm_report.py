"""The report of bench_vllm_kv.py: tables, what misses a bar, and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.grid import BAR as BAR_CELL
from benchmarks.vllm_cases import KEPT, NEVER, REUSE, TWO, WITHOUT

BAR_THROUGHPUT, BAR_COPY, BAR_KEPT, BAR_NEVER = 1.5, 0.8, 0.97, 0.98


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
    if document["copies"]:
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
    """What this run does not reach with the lower ends of its intervals."""
    if REUSE not in document["results"]:
        return cells_missed(document["results"])
    missed = []
    for server, found in document["results"][REUSE].items():
        if server not in WITHOUT:
            gained = found["throughput_ratio"]
            missed += _below(gained, BAR_THROUGHPUT, f"{server}, throughput over no offload")
        if "over_two_tiers" in found:
            missed += _below(found["over_two_tiers"], BAR_KEPT, f"{server}, over two tiers")
    for server, found in document["results"][NEVER].items():
        if server in WITHOUT:
            continue
        kept = found["throughput_ratio"]
        missed += _below(kept, BAR_NEVER, f"{server}, over no offload for {NEVER}")
    for row in document["copies"]:
        if row["of_this_load"]:
            missed += _below(row["ratio"], BAR_COPY, "copy worker, over memcpy")
    return missed


def _below(ratio: dict[str, float], bar: float, what: str) -> list[str]:
    """The line of a ratio whose interval begins below its bar, or nothing."""
    if ratio["low"] >= bar:
        return []
    interval = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
    return [f"{what}: {interval}, the bar is {bar} by the lower end"]


def cells_missed(results: dict[str, Any]) -> list[str]:
    """Of a grid."""
    return [
        line
        for cell, servers in results.items()
        for server, found in servers.items()
        if server not in WITHOUT
        for line in _below(
            found["throughput_ratio"], BAR_CELL, f"{cell}, {server}, over no offload"
        )
    ]


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
