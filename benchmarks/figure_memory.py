"""Figures of the three papers about the memory itself: interleaving, topologies, Caption."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.figure_parts import (
    Curve,
    Given,
    Panel,
    Paper,
    Point,
    Tier,
    asked,
    cases,
    fact,
    fact_point,
    point,
    swept,
)
from cxl_offload.core import LINE_BYTES
from cxl_offload.plan.equations.interleave import bandwidth_bound
from cxl_offload.sim import loaded_latency_ns
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.topology import Machine, load_machine
from cxl_offload.units import GB
from cxl_offload.validation.bandwidth import loop_of_case, tiers_of_machine
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.loaded_latency import lines_in_flight
from cxl_offload.validation.mixed_tier import speedup

SHARES = tuple(float(share) for share in range(0, 101, 2))
"""Per cent of the pages on CXL."""

PERIODS = 24
LAST = 8
"""Periods of Caption that are drawn, and those of them in which it has settled."""


def _rates(machine: Machine) -> tuple[tuple[float, float], tuple[float, float]]:
    """Latencies in ns and bandwidths in bytes/s, (DRAM, CXL)."""
    near, far = machine.access(0, 0), machine.access(0, 1)
    known = [
        (each.read_latency_ns, each.read_bandwidth_bytes_per_s)  # type: ignore[union-attr]
        for each in (near, far)
    ]
    latency, bandwidth = zip(*known, strict=True)
    return latency, bandwidth


def _speedups(case: str, label: str, tier: Tier) -> tuple[Curve, Curve]:
    """Speed-up over DRAM alone by the share of pages on CXL: predicted, and simulated."""
    inputs = Inputs(cases()[case].inputs)
    snc = inputs.integer("snc")
    tiers, cores = tiers_of_machine(inputs.text("system"), snc=snc)
    loop = loop_of_case(inputs, cores)
    predicted = tuple(speedup(tiers, loop, (100 - share, share)) for share in SHARES)
    machine = load_machine("xeon8468", variant={"snc": snc, "prefetch": loop.prefetch})
    latency, bandwidth = _rates(machine)
    step = TwoTierStep(
        latency_ns=latency,
        bandwidth_bytes_per_s=bandwidth,
        lines_in_flight=loop.cores * loop.lines_per_core,
        memory_bytes=GB,
    )
    seconds = step.curve(np.array(SHARES) / 100)
    simulated = tuple(float(each) for each in seconds[0] / seconds)
    return (
        Curve(label, "predicted", tier, SHARES, predicted),
        Curve(label, "simulated", tier, SHARES, simulated),
    )


def _interleaving() -> Panel:
    best, share, scans = "001-SEQ-R-SNC4", "001-SEQ-R-SNC4-ratio", "001-SSB-9to1"
    printed: Any = cases()[share].expected.value  # type: ignore[union-attr]
    scan: Any = cases()[scans].inputs["weights"]
    return Panel(
        "Speed-up over DRAM alone by pages on CXL", "% of the pages on CXL",
        "times DRAM alone",
        (
            *_speedups(best, "2 channels (SNC-4), stream", "far"),
            *_speedups("001-UTIL-full-scalar", "8 channels, stream", "near"),
            *_speedups(scans, "8 channels, fewer lines in flight", "both"),
        ),
        (
            point(best, "best speed-up, 2 channels", 100 * printed[1] / sum(printed)),
            point(scans, "database scans, 9:1, 8 channels", 100 * scan[1] / sum(scan)),
        ),
        y_range=(0, 2.0),
    )  # fmt: skip


def _gains() -> Panel:
    rows = {
        "001-UTIL-full-scalar": "gain over CXL's own bandwidth, 8 channels",
        "001-UTIL-SNC4": "gain over CXL's own bandwidth, 2 channels",
        "001-HT-sat": "gain by a second thread a core, saturated",
    }
    points = tuple(point(case, what, at) for at, (case, what) in enumerate(rows.items()))
    return Panel("What is gained at the best share", "fraction", points=points, rows=True)


def _loaded() -> Panel:
    """Latency under load of DRAM and CXL, as more lines are in flight."""
    case = "001-LOAD-DRAM2x"
    inputs: Any = cases()[case].inputs
    most = lines_in_flight(
        inputs["calibration"]["bandwidth_gb_s"] * GB, inputs["calibration"]["latency_ns"]
    )
    machine = load_machine("xeon8468", variant={"throughput": "mlc"})
    latency, bandwidth = _rates(machine)
    lines = np.geomspace(4, most, 60)
    curves, given = [], []
    tiers: tuple[tuple[str, Tier], ...] = (("DRAM", "near"), ("CXL", "far"))
    for (label, tier), idle, rate in zip(tiers, latency, bandwidth, strict=True):
        found = [
            float(
                loaded_latency_ns(
                    [1.0],
                    idle_latency_ns=[idle],
                    bandwidth_bytes_per_s=[rate],
                    lines_in_flight=each,
                )[0]
            )
            for each in lines
        ]
        reached = tuple(float(n * LINE_BYTES / ns) for n, ns in zip(lines, found, strict=True))
        curves.append(Curve(label, "simulated", tier, reached, tuple(found)))
        given.append(Given(0, idle, f"xeon8468: latency of {label}"))
    known = inputs["calibration"]
    given.append(Given(known["bandwidth_gb_s"], known["latency_ns"], f"case {case}: calibration"))
    printed = point(case, "highest latency of DRAM", inputs["peak_gb_s"], unit="ns")
    return Panel(
        "Latency under load, 8 channels", "GB/s", "ns", tuple(curves), (printed,), tuple(given),
        y_range=(0, 1250),
    )  # fmt: skip


@functools.cache
def _bandwidth() -> tuple[Panel, ...]:
    return _interleaving(), _loaded(), _gains()


def _changed(form: Mapping[str, object], key: str, value: float) -> dict[str, object]:
    return {**form, key: value}


@functools.cache
def _servers() -> tuple[Panel, Panel]:
    """What CXL saves by threads and by the price of a server: the equations, both ways."""
    case = "002-TCO-ratio"
    forms: tuple[tuple[str, Tier, dict[str, object]], ...] = (
        ("as printed", "far", {}),
        ("corrected", "near", {"form": "corrected"}),
        ("corrected, congestion", "remote", {"form": "corrected", "congestion": "multiply"}),
    )
    inputs: Any = cases()[case].inputs
    threads = tuple(float(count) for count in range(1, 25))
    costs = tuple(float(cost) for cost in np.linspace(1, 1.6, 25))
    by_threads, by_cost = [], []
    for label, tier, form in forms:
        by_threads.append(
            swept(
                case, label, tier, threads, functools.partial(_changed, form, "n_threads"),
                item=0, scale=100,
            )
        )  # fmt: skip
        by_cost.append(
            swept(
                case, label, tier, costs, functools.partial(_changed, form, "r_t"),
                item=1, scale=100,
            )
        )  # fmt: skip
    needed = point(
        case, "servers with CXL, worked example", inputs["n_threads"], unit="%", item=0, scale=100
    )
    saved = point(case, "cost saved, worked example", inputs["r_t"], unit="%", item=1, scale=100)
    return (
        Panel(
            "Servers needed for the same time", "threads", "% of those without CXL",
            tuple(by_threads), (needed,), y_range=(50, 90),
        ),
        Panel(
            "Cost saved by CXL", "price of a server with CXL, one without = 1",
            "% of the cost saved", tuple(by_cost), (saved,),
        ),
    )  # fmt: skip


def _dlrm() -> Panel:
    """Bandwidth by the share on CXL, and where the paper's recommender peaks."""
    machine = load_machine("xeon6430")
    curves, shares = [], tuple(float(share) for share in range(101))
    kinds: tuple[tuple[str, Tier], ...] = (("load", "far"), ("store", "remote"))
    for access, tier in kinds:
        ratio, _, _ = fact(machine, f"ldram_over_cxl_a_{access}_bandwidth_ratio")
        y = tuple(_over_dram(ratio, share) for share in shares)
        curves.append(Curve(f"{access}s", "predicted", tier, shares, y))
    best, _, _ = fact(machine, "dlrm_best_cxl_share_ratio")
    loads, _, _ = fact(machine, "ldram_over_cxl_a_load_bandwidth_ratio")
    best_speedup = fact_point(
        machine, "dlrm_best_over_ldram_ratio", "DLRM at its best share, over DRAM", 100 * best,
        _over_dram(loads, 100 * best),
    )  # fmt: skip
    return Panel(
        "Bandwidth of two DDR5 channels and CXL-A", "% of the pages on CXL", "times DRAM alone",
        tuple(curves), (best_speedup,), y_range=(0, 2.1),
    )  # fmt: skip


def _over_dram(ratio: float, percent: float) -> float:
    shares = (1 - percent / 100, percent / 100)
    return bandwidth_bound((ratio, 1.0), shares) / ratio


def _climb() -> Panel:
    """Algorithm 1 in a closed loop on the bandwidth equation."""
    machine = load_machine("xeon6430")
    low, where, held = fact(machine, "caption_lowest_cxl_share_ratio")
    high, _, _ = fact(machine, "caption_highest_cxl_share_ratio")
    curves, points = [], []
    kinds: tuple[tuple[str, str, Tier], ...] = (("ld", "loads", "far"), ("st", "stores", "remote"))
    periods = tuple(float(each) for each in range(1, PERIODS + 1))
    for at, (short, label, tier) in enumerate(kinds):
        found = asked(f"derived-CAPTION-loop-{short}", periods=PERIODS)
        curves.append(Curve(label, "predicted", tier, periods, tuple(found)))
        settled = sum(found[-LAST:]) / LAST
        one = Point(
            f"share where Caption settles, all {label}", PERIODS + 1.5 + at, low * 100, high * 100,
            settled, "%", where, held, tier=tier,
        )  # fmt: skip
        points.append(one)
    return Panel(
        "Caption's algorithm on that bandwidth", "periods", "% of the pages on CXL",
        tuple(curves), tuple(points), y_range=(0, 70),
    )  # fmt: skip


@functools.cache
def _caption() -> tuple[Panel, ...]:
    return _dlrm(), _climb()


BANDWIDTH = Paper(
    "bandwidth",
    "Lebedev et al., Demystifying CXL Memory Bandwidth Expansion for Analytical Workloads",
    "Weighted interleaving over DRAM and CXL",
    _bandwidth,
)
TOPOLOGY = Paper(
    "topology",
    "Wu et al., Performance Study of CXL Memory Topology",
    "Cost of servers with CXL memory",
    _servers,
)
CAPTION = Paper(
    "caption",
    "Sun et al., Demystifying CXL Memory with Genuine CXL-Ready Systems",
    "Interleaving with a CXL card, and Caption's tuning",
    _caption,
)
