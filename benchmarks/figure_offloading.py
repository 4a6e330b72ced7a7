"""Figures of the two papers that offload models: FlexGen, ZeRO-Offload, copies to a GPU, vLLM."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.figure_parts import (
    Bar,
    Curve,
    Given,
    Kind,
    Panel,
    Paper,
    Tier,
    cases,
    fact_point,
    point,
    swept,
)
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.training.zero_offload import step_times
from cxl_offload.sim import (
    Event,
    ModelShape,
    TensorHome,
    Trace,
    TrainingWork,
    replay,
    training_trace,
)
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.topology import Machine, load_machine
from cxl_offload.units import GB, GIB
from cxl_offload.validation.loaded_latency import lines_in_flight
from cxl_offload.validation.training import OffloadedTraining, interleaved_step

MIB = 1 << 20
STEP_GIB = 4

GPT2_8B = ModelShape(
    layers=72, width=3072, heads=24, kv_heads=24, head_width=128, inner=12288, vocab=50257
)
"""The 8 billion of ZeRO-Offload (Ren et al., USENIX ATC 2021); the paper prints no shape."""


def _planned() -> Panel:
    """The planner's own batch and placement, as host memory grows by one tier or the other."""
    case = "plan-cxl-over-ldram"
    everything: Any = cases()["000-T2-LLAMA-ALL-batch"].inputs["tiers_gib"]
    local = everything["ldram"]

    def asked_for(tier: str, gib: float) -> dict[str, object]:
        limits = {"ldram": local, tier: gib - local}
        return {"a": {"tiers": ["ldram", tier], "limits_gib": limits}}

    curves, points = [], []
    seconds: tuple[tuple[str, Tier], ...] = (("rdram", "remote"), ("cxl", "far"))
    for tier, colour in seconds:
        name, end = tier.upper(), local + everything[tier]
        sizes = [*range(local + 16, end, 16), end]
        change = functools.partial(asked_for, tier)
        curve = swept(case, f"+ {name}", colour, map(float, sizes), change)
        curves.append(replace(curve, x=(float(local), *curve.x), y=(1.0, *curve.y)))
        printed = point(f"000-LIO3-LDRAM+{name}-overall", "", end)
        what = f"planned: LDRAM+{name} over LDRAM"
        points.append(replace(printed, what=what, predicted=curve.y[-1]))
    return Panel(
        "FlexGen's throughput as planned, LLaMA-65B", "GiB of host memory offered",
        "times LDRAM alone", tuple(curves), tuple(points),
    )  # fmt: skip


def _batch() -> Panel:
    """The batch that FlexGen's search chooses, as host memory grows tier by tier."""
    first = "000-T2-LLAMA-LDRAM-batch"
    everything: Any = cases()["000-T2-LLAMA-ALL-batch"].inputs["tiers_gib"]
    local, remote, cxl = (everything[tier] for tier in ("ldram", "rdram", "cxl"))

    def filled(order: dict[str, float], gib: float) -> dict[str, object]:
        tiers, left = {}, gib
        for tier, capacity in order.items():
            tiers[tier] = min(left, capacity)
            left -= tiers[tier]
        return {"tiers_gib": {tier: size for tier, size in tiers.items() if size > 0}}

    def grown(label: str, tier: Tier, begin: float, order: dict[str, float]) -> Curve:
        end = sum(order.values())
        sizes = np.linspace(begin, end, 1 + round((end - begin) / STEP_GIB))
        return swept(first, label, tier, map(float, sizes), lambda gib: filled(order, gib))

    printed = {
        first: "batch, LDRAM",
        "000-LIO3-batch-LLAMA-L+C": "batch, LDRAM+CXL",
        "000-T2-LLAMA-LDRAM+RDRAM-batch": "batch, LDRAM+RDRAM",
        "000-T2-LLAMA-ALL-batch": "batch, all three",
    }
    points = []
    for case, what in printed.items():
        offered: Any = cases()[case].inputs["tiers_gib"]
        points.append(point(case, what, sum(offered.values()), unit="sequences"))
    ldram = {"ldram": local}
    return Panel(
        "FlexGen's batch, by host memory", "GiB of host memory offered", "sequences",
        (
            grown("LDRAM", "near", local - 36, ldram),
            grown("+ RDRAM", "remote", local, {**ldram, "rdram": remote}),
            grown("+ CXL", "far", local, {**ldram, "cxl": cxl}),  # alike, and seen on top
            grown("+ RDRAM + CXL", "both", local + remote, everything),
        ),
        tuple(points),
    )  # fmt: skip


RATIOS = {
    "000-LIO1-LLAMA-CXLvsNVMe": "overall: LDRAM+CXL over LDRAM+NVMe",
    "000-LIO2-decode-CXLvsNVMe": "decode: LDRAM+CXL over LDRAM+NVMe",
    "000-LIO3-LDRAM+RDRAM-overall": "overall: LDRAM+RDRAM over LDRAM",
    "000-LIO3-LDRAM+CXL-overall": "overall: LDRAM+CXL over LDRAM",
    "000-LIO3-LDRAM+CXL-decode": "decode: LDRAM+CXL over LDRAM",
    "000-LIO1-RDRAMvsCXL": "overall: LDRAM+RDRAM over LDRAM+CXL",
    "000-LIO2-prefill-RDRAMvsCXL": "prefill: LDRAM+RDRAM over LDRAM+CXL",
    "000-TR-opt-slowdown": "Adam on the CPU: LDRAM+CXL over LDRAM, time",
}


def _ratios() -> Panel:
    points = [point(case, what, at) for at, (case, what) in enumerate(RATIOS.items())]
    machine = load_machine("epyc9354-cxl-a")
    mixed, local = (_simulated_step(nodes, machine)["optimizer"] for nodes in ([0, 2], [0]))
    simulated = replace(points[-1], x=len(points), predicted=mixed / local, kind="simulated")
    points.append(simulated)
    return Panel(
        "FlexGen's throughput, ZeRO-Offload's optimizer", "ratio", points=tuple(points), rows=True
    )


def _predicted_step(tiers: list[str], numbers: MachineRates) -> dict[str, float]:
    inputs: Any = cases()["000-TR-opt-slowdown"].inputs
    training = OffloadedTraining(
        params=inputs["params"],
        tokens=inputs["batch"] * inputs["seq_len"],
        gpu_flops_per_s=inputs["gpu_tflops"] * 1e12,
        optimizer_bytes_per_s=inputs["optimizer_gb_s"] * GB,
    )
    step, _ = interleaved_step(training, numbers, tiers)
    return {
        "optimizer": step.optimizer_s,
        "forward and backward": step.forward_s + step.backward_s,
        "exposed copies": step_times(step).exposed_transfer_s,
    }


def _simulated_step(nodes: list[int], machine: Machine) -> dict[str, float]:
    inputs: Any = cases()["000-TR-opt-slowdown"].inputs
    home = TensorHome(nodes=dict.fromkeys(nodes, 1 / len(nodes)))
    work = TrainingWork(
        shape=GPT2_8B, micro_batch=inputs["batch"], tokens=inputs["seq_len"],
        gradients=home, master=home, momentum=home, variance=home,
    )  # fmt: skip
    phases = replay(training_trace(work), machine).phase_seconds
    return {
        "optimizer": phases["optimizer"],
        "forward and backward": phases["forward"] + phases["backward"],
    }


def _training_step() -> Panel:
    machine = load_machine("epyc9354-cxl-a")
    numbers = MachineRates(machine)
    local = _predicted_step(["ldram"], numbers)
    rows: list[tuple[str, Kind, dict[str, float]]] = [
        ("LDRAM", "predicted", local),
        ("LDRAM+CXL", "predicted", _predicted_step(["ldram", "cxl"], numbers)),
        ("LDRAM", "simulated", _simulated_step([0], machine)),
        ("LDRAM+CXL", "simulated", _simulated_step([0, 2], machine)),
    ]
    bars = []
    for where, kind, parts in rows:
        whole = sum(parts.values())
        shares = tuple((name, 100 * part / whole) for name, part in parts.items())
        bars.append(Bar(f"{where}, {whole:.1f} s", kind, shares))
    optimizer, _, copies = (share for _, share in bars[0].parts)
    shown = {
        "zero_offload_optimizer_share_ratio": ("optimizer's share of a step", optimizer),
        "zero_offload_exposed_copies_share_ratio": ("exposed copies' share of a step", copies),
    }
    first, last = (
        fact_point(machine, name, what, 0, predicted, unit="%", scale=100)
        for name, (what, predicted) in shown.items()
    )
    points = replace(first, x=first.low), replace(last, x=100 - last.low, bound="at most")
    return Panel(
        "ZeRO-Offload, GPT2 8B, batch 3: a step",
        "% of the step",
        bars=tuple(bars),
        points=points,
        x_range=(0, 100),
    )


@functools.cache
def _use_cases() -> tuple[Panel, ...]:
    return _batch(), _planned(), _ratios(), _training_step()


def _copies() -> Panel:
    machine = load_machine("spr3-h100")
    sizes = tuple(float(size) for size in range(16, 273, 16))
    first = "004-T6-160"
    curves, points = [], []
    sources: tuple[tuple[Tier, int, str], ...] = (("near", 0, "DRAM"), ("far", 2, "CXL"))
    for item, (tier, node, label) in enumerate(sources):
        name = f"from {label}"
        taken = [_copy_ms(machine, node, int(mib) * MIB) for mib in sizes]
        curves += [
            swept(first, name, tier, sizes, lambda mib: {"bytes": mib * MIB}, item=item),
            Curve(name, "simulated", tier, sizes, tuple(taken)),
        ]
        for case in ("004-T6-128", first):
            size: Any = cases()[case].inputs["bytes"]
            mib = size / MIB
            what = f"copy of {mib:.0f} MiB from {label}"
            points.append(point(case, what, mib, unit="ms", item=item))
    return Panel(
        "H100: pinned copies to the GPU", "MiB copied", "ms", tuple(curves), tuple(points),
        y_range=(0, 15),
    )  # fmt: skip


def _copy_ms(machine: Machine, node: int, nbytes: int) -> float:
    one = Event("load", 0, "weights", "h2d", "weights", {node: nbytes}, {}, nbytes)
    return replay(Trace([one]), machine).seconds * 1e3


def _vllm() -> Panel:
    first = "004-T5-H100DIMM-90"
    sizes = tuple(float(size) for size in range(60, 131))
    link = (load_machine("spr3-h100").dma_bandwidth("H100", 2) or 0.0) / GB
    curves = (
        swept(first, "weights in DRAM", "near", sizes, lambda gib: {"offload_gib": gib}),
        swept(
            first, "weights in CXL", "far", sizes,
            lambda gib: {"offload_gib": gib, "link_gb_s": link},
        ),
    )  # fmt: skip
    points = [
        point(f"004-T5-H100DIMM-{gib}", f"vLLM, {gib} GiB in DRAM", gib, unit="tokens/s")
        for gib in (70, 80, 90, 100)
    ]
    return Panel(
        "H100, LLaMA-3-70B: vLLM by weights offloaded", "GiB of weights offloaded", "tokens/s",
        curves, tuple(points), y_range=(0, 150),
    )  # fmt: skip


def _sockets() -> Panel:
    """Pages over two sockets of SPR-1: the equation, and a closed network of lines in flight."""
    case = "004-WI-110-ASIC"
    inputs: Any = cases()[case].inputs
    local, remote, _ = inputs["bandwidth_gib_s"]
    loaded: Any = cases()["004-LOAD-4ch"].inputs["calibration"]
    machine = load_machine("spr-1")
    near, far = machine.access(0, 0), machine.access(0, 1)
    latency = near.read_latency_ns, far.read_latency_ns  # type: ignore[union-attr]
    step = TwoTierStep(
        latency_ns=latency,  # type: ignore[arg-type]
        bandwidth_bytes_per_s=(local * GIB, remote * GIB),
        lines_in_flight=lines_in_flight(loaded["bandwidth_gb_s"] * GB, loaded["latency_ns"]),
        memory_bytes=GIB,
    )
    shares = np.linspace(0, 1, 51)
    percent = tuple(float(share) for share in 100 * shares)
    reached = tuple(float(rate) for rate in 1 / step.curve(shares))
    equation = swept(
        case, "equation", "remote", percent, lambda x: {"weights": [100 - x, x, 0]}
    )  # fmt: skip
    return Panel(
        "SPR-1: pages spread over two sockets", "% of the pages on the other socket", "GiB/s",
        (equation, Curve("lines in flight", "simulated", "both", percent, reached)),
        (point(case, "bandwidth, pages 1:1 over two sockets", 50, unit="GiB/s"),),
        (
            Given(0, local, f"case {case}: bandwidth_gib_s"),
            Given(100, remote, f"case {case}: bandwidth_gib_s"),
        ),
    )  # fmt: skip


def _loaded() -> Panel:
    """One loop on the local and on the remote socket, as its threads have more lines in flight."""
    case = "004-LOAD-4ch"
    inputs: Any = cases()[case].inputs
    known = inputs["calibration"]
    at = lines_in_flight(known["bandwidth_gb_s"] * GB, known["latency_ns"])
    lines = tuple(float(each) for each in np.linspace(at / 20, at, 39))
    curve = swept(
        case, "other socket", "remote", lines,
        lambda each: {"concurrency_ratio": each / at},
    )  # fmt: skip
    return Panel(
        "SPR-1: latency under load, other socket", "cache lines in flight", "ns", (curve,),
        (point(case, "highest latency, other socket", at, unit="ns"),), y_range=(0, 750),
    )  # fmt: skip


@functools.cache
def _heimdall() -> tuple[Panel, ...]:
    return _copies(), _vllm(), _sockets(), _loaded()


USE_CASES = Paper(
    "use-cases",
    "Wang et al., Performance Characterization of CXL Memory and Its Use Cases",
    "Inference and training with offloading on the A10 machine",
    _use_cases,
)
HEIMDALL = Paper(
    "heimdall",
    "Wang et al., Hitchhiker's Guide (Heimdall)",
    "Copies to an H100, vLLM, two sockets",
    _heimdall,
)
