"""How long the planner searches: OPT-175B over a GPU, four host tiers and a drive.

Correctness first: the answer must fit. Times are
of the whole batch-and-placement search in this process, median of several runs; nothing of the
plan is measured. For comparison, FlexGen's own search (experimental/cost_model.py, one CBC
process a program) took 5.3 s for OPT-175B with one host tier.

``--plans`` times whole plans instead, with prices and replay: every shipped model by every
executor, on machines of 8 and 12 unequal nodes, and with ``--shipped`` on every shipped machine. It
takes ten minutes and more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from typing import Any

from benchmarks.planner_requests import timed_plans
from cxl_offload.plan.flexgen.job import flexgen_job
from cxl_offload.plan.flexgen.planner import plan_flexgen
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.topology import Access, Machine, Node, NodeKind, Tier, load_machine

LIMIT_S = 1.0
PLAN_LIMIT_S = 2.0
SLOWEST = 15
CASES = (
    ("opt-175b", 512, 32),
    ("opt-175b", 1024, 128),
    ("opt-66b", 512, 32),
    ("opt-30b", 512, 32),
    ("opt-1.3b", 512, 32),
)
"""Model, tokens of a prompt, tokens to generate."""


def four_tiers() -> Machine:
    """System A of the machine files with an HBM node added, so that there are four host tiers."""
    machine = load_machine("epyc9354-cxl-a")
    node = Node(3, NodeKind.HBM, (), 64 << 30)
    tiers = [tier for tier in machine.tiers if tier.name != "nvme"]
    return replace(
        machine,
        nodes=(*machine.nodes, node),
        accesses=(*machine.accesses, Access(0, 3, 130.0, None, 6e11)),
        tiers=(*tiers, Tier("hbm", (3,)), Tier("nvme", ())),
    )


def searched(
    name: str, prompt: int, generated: int, hardware: Hardware, runs: int
) -> dict[str, Any]:
    """The times of one search, whose answer must fit."""
    job = flexgen_job(load_model(name), prompt=prompt, generated=generated)
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        found = plan_flexgen(job, hardware)
        seconds.append(time.perf_counter() - start)
    assert found is not None
    assert all(
        nbytes <= tier.usable_bytes
        for nbytes, tier in zip(found.loads.host, hardware.nodes, strict=True)
    )
    return {
        "model": name,
        "tokens": f"{prompt}+{generated}",
        "median_s": statistics.median(seconds),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "programs": found.programs,
        "predicted_tokens_per_s": found.phases.tokens_per_s,
    }


def whole_plans(*, shipped: bool, as_json: bool) -> None:
    """Times whole plans and prints how many are made in time, and the slowest."""
    timed = sorted(timed_plans(shipped=shipped), key=lambda each: -each.cpu_s)
    seconds = [each.cpu_s for each in timed]
    late = sum(each > PLAN_LIMIT_S for each in seconds)
    if as_json:
        rows = [{"request": each.request, "cpu_s": each.cpu_s} for each in timed]
        print(json.dumps({"host": platform.processor(), "late": late, "rows": rows}, indent=1))
        return
    print("CPU seconds of whole plans, measured")
    for each in timed[:SLOWEST]:
        print(f"{each.cpu_s:7.2f}  {each.request}")
    print(
        f"{len(timed)} plans: median {statistics.median(seconds):.2f} s, worst {seconds[0]:.2f} s; "
        f"{late} take more than {PLAN_LIMIT_S:g} s"
    )


def main() -> None:
    """Times the search and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", action="store_true", help="time whole plans instead")
    parser.add_argument("--shipped", action="store_true", help="on every shipped machine too")
    args = parser.parse_args()
    if args.plans:
        whole_plans(shipped=args.shipped, as_json=args.json)
        return
    hardware = hardware_of(four_tiers())
    rows = [searched(*case, hardware, args.runs) for case in CASES]
    if args.json:
        print(json.dumps({"host": platform.processor(), "runs": args.runs, "rows": rows}, indent=1))
        return
    print("search times measured, speeds predicted; 4 host tiers, GPU and NVMe")
    print(f"{'model':10} {'tokens':9} {'median':>8} {'least':>8} {'most':>8} {'MIPs':>5}")
    for row in rows:
        print(
            f"{row['model']:10} {row['tokens']:9} {row['median_s']:7.3f}s {row['least_s']:7.3f}s "
            f"{row['most_s']:7.3f}s {row['programs']:5}"
        )
    slow = [row for row in rows if row["model"] == "opt-175b" and row["median_s"] > LIMIT_S]
    print("OPT-175B within 1 s: " + ("no" if slow else "yes"))


if __name__ == "__main__":
    main()
