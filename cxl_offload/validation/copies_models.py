"""Public models of copies between host memory and a GPU."""

from __future__ import annotations

from cxl_offload.units import GB, GIB
from cxl_offload.validation.answers import Answer, PublicModel, machine_numbers
from cxl_offload.validation.copy_path import (
    CopyPath,
    copy_seconds,
    extra_setup_s,
    path_of_machine,
)
from cxl_offload.validation.inputs import Inputs

SHARES_SUM_SLACK = 1e-3
"""Shares written with three digits (thirds) still count as a whole."""


def _sources(inputs: Inputs) -> list[dict[str, float]]:
    """Shares of the tiers in each source, scaled to sum to one."""
    sources = []
    for source in inputs.nested_list("sources"):
        shares = {tier: source.number(tier) for tier in source.values}
        total = sum(shares.values())
        if abs(total - 1) > SHARES_SUM_SLACK:
            raise ValueError(f"{source.where}: shares sum to {total:g}, want 1")
        sources.append({tier: share / total for tier, share in shares.items()})
    if not sources:
        raise ValueError("'sources' in inputs is empty")
    return sources


def _path(inputs: Inputs, sources: list[dict[str, float]]) -> tuple[CopyPath, tuple[str, ...]]:
    """The path from explicit rates, or that of the machine named."""
    tiers = list(dict.fromkeys(tier for shares in sources for tier in shares))
    if "link_gib_s" not in inputs and "node_gib_s" not in inputs:
        numbers = machine_numbers(inputs)
        return path_of_machine(numbers, tiers), tuple(numbers.notes)
    nodes = inputs.named_numbers("node_gib_s", above=True)
    unknown = [tier for tier in tiers if tier not in nodes]
    if unknown:
        raise ValueError(f"sources name {unknown[0]!r}, node_gib_s only {', '.join(nodes)}")
    setup = (inputs.optional_number("setup_us") or 0.0) * 1e-6
    path = CopyPath(
        link_bytes_per_s=inputs.number("link_gib_s", above=True) * GIB,
        tier_bytes_per_s={tier: rate * GIB for tier, rate in nodes.items()},
        tier_setup_s=dict.fromkeys(nodes, setup),
    )
    return path, ()


def _gpu_copy_time(inputs: Inputs) -> Answer:
    metrics = ("time_ms", "bandwidth_gib_s", "time_ratio", "bandwidth_spread")
    metric = inputs.choice("metric", metrics)
    sources = _sources(inputs)
    path, notes = _path(inputs, sources)
    nbytes = inputs.number("bytes", above=True)
    seconds = [copy_seconds(path, shares, nbytes) for shares in sources]
    if metric == "time_ms":
        return Answer([each * 1e3 for each in seconds], notes)
    if metric == "bandwidth_gib_s":
        return Answer([nbytes / each / GIB for each in seconds], notes)
    if metric == "time_ratio":
        if len(seconds) != 2:
            raise ValueError(f"time_ratio of {len(seconds)} sources, want 2")
        return Answer(seconds[1] / seconds[0], notes)
    return Answer(max(seconds) / min(seconds) - 1, notes)


def _gpu_copy_latency(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("extra_us", "min_bytes"))
    numbers = machine_numbers(inputs)
    extra_setup = extra_setup_s(numbers, "cxl")
    unknown = f"{numbers.machine.name} does not say what a small copy from cxl costs more"
    if metric == "min_bytes":
        if extra_setup is None:
            raise ValueError(unknown)
        link_bytes_per_s = inputs.number("link_gb_s", above=True) * GB
        most = inputs.number("max_overhead_fraction", above=True)
        return Answer(extra_setup * link_bytes_per_s / most)
    if extra_setup is None:
        numbers.note(f"{unknown}: only the bandwidths differ")
    path, nbytes = path_of_machine(numbers, ["cxl", "ldram"]), inputs.number("bytes")
    far, near = (copy_seconds(path, {tier: 1.0}, nbytes) for tier in ("cxl", "ldram"))
    return Answer(inputs.integer("copies") * (far - near) * 1e6, tuple(numbers.notes))


MODELS = (
    PublicModel(
        "gpu_copy_time",
        ("link_gib_s", "node_gib_s", "setup_us", "bytes", "sources", "metric"),
        _gpu_copy_time,
    ),
    PublicModel(
        "gpu_copy_latency",
        ("copies", "bytes", "metric", "link_gb_s", "max_overhead_fraction"),
        _gpu_copy_latency,
    ),
)
