"""Public models of bandwidth and latency of memory, mixed or loaded."""

from __future__ import annotations

from cxl_offload.plan.equations import interleave
from cxl_offload.plan.machine_rates import UNBOUND, MachineRates
from cxl_offload.topology import load_machine
from cxl_offload.units import GB, GIB
from cxl_offload.validation import loaded_latency, mixed_tier
from cxl_offload.validation.answers import Answer, PublicModel, machine_name
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.mixed_tier import MixedTiers, TierRates


def _bandwidths(inputs: Inputs, *, above: bool) -> tuple[list[float], float]:
    """``bandwidth_gb_s`` or ``bandwidth_gib_s`` in that unit, and the bytes of the unit."""
    given = [key for key in ("bandwidth_gb_s", "bandwidth_gib_s") if key in inputs]
    if len(given) != 1:
        raise ValueError("give either 'bandwidth_gb_s' or 'bandwidth_gib_s'")
    return inputs.numbers(given[0], above=above), float(GB if given[0] == "bandwidth_gb_s" else GIB)


def _interleave_bandwidth(inputs: Inputs) -> Answer:
    rates, unit = _bandwidths(inputs, above=False)
    shares = interleave.shares_of_weights(inputs.numbers("weights"))
    latencies = inputs.numbers("latency_ns", above=True) if "latency_ns" in inputs else None
    reached = mixed_tier.interleaved_bandwidth(
        [rate * unit for rate in rates],
        shares,
        latency_ns=latencies,
        lines_in_flight=inputs.optional_number("lines_in_flight", above=True),
    )
    return Answer(reached / unit)


def _optimal_shares(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("shares", "bandwidth", "best_weights"))
    rates, _ = _bandwidths(inputs, above=False)
    if metric == "shares":
        return Answer(list(interleave.shares_of_weights(rates)))  # every tier is saturated at once
    if metric == "bandwidth":
        return Answer(sum(rates))
    return Answer(list(interleave.best_weights(rates, total=inputs.integer("grid_total", low=1))))


def _latency_factor(inputs: Inputs) -> Answer:
    """Throughput against all pages on the first tier: lines in flight fixed, nothing saturated."""
    shares = interleave.shares_of_weights(inputs.numbers("weights"))
    latencies = inputs.numbers("latency_ns", above=True)
    return Answer(latencies[0] / interleave.mean_latency_ns(latencies, shares))


def _loaded_latency(inputs: Inputs) -> Answer:
    if ("lines_in_flight" in inputs) == ("calibration" in inputs):
        raise ValueError("give either 'lines_in_flight' or 'calibration'")
    if "lines_in_flight" in inputs:
        lines = inputs.number("lines_in_flight")
    else:
        point = inputs.nested("calibration", ("bandwidth_gb_s", "latency_ns"))
        lines = loaded_latency.lines_in_flight(
            point.number("bandwidth_gb_s") * GB, point.number("latency_ns")
        )
    if "concurrency_ratio" in inputs:
        lines *= inputs.number("concurrency_ratio")
    latency = loaded_latency.closed_loop_latency_ns(
        idle_latency_ns=inputs.number("idle_latency_ns"),
        peak_bytes_per_s=inputs.number("peak_gb_s", above=True) * GB,
        lines=lines,
    )
    return Answer(latency)


def _concurrency(inputs: Inputs) -> Answer:
    lines = loaded_latency.lines_in_flight(
        inputs.number("bandwidth_gb_s") * GB, inputs.number("latency_ns")
    )
    return Answer(lines / inputs.number("threads", above=True))


def _cores_used(inputs: Inputs, cores: int, smt: int) -> float:
    """Cores that ``threads`` keep busy: one each, or ``smt`` on one where the cores do not do."""
    threads = inputs.integer("threads", low=1)
    if threads > cores * smt:
        raise ValueError(f"threads = {threads}, but {cores} cores with smt = {smt}")
    return threads if threads <= cores else threads / smt


def loop_of_case(inputs: Inputs, cores: int) -> mixed_tier.Loop:
    """The loop that a case describes, on a machine with so many cores."""
    smt = inputs.integer("smt", low=1, default=1)
    patterns: tuple[mixed_tier.Pattern, ...] = ("sequential", "strided", "indexed", "scatter")
    pattern = inputs.choice("pattern", patterns)
    element = inputs.integer("element_bytes", low=1)
    stride = inputs.integer("stride_bytes", low=1, default=element)
    if pattern == "strided" and "stride_bytes" not in inputs:
        raise ValueError("'stride_bytes' is missing in inputs: pattern = 'strided' needs it")
    return mixed_tier.Loop(
        cores=_cores_used(inputs, cores, smt),
        lines_per_core=inputs.number("lines_in_flight_per_core", above=True),
        access=inputs.choice("access", ("read", "write")),
        pattern=pattern,
        prefetch=inputs.boolean("prefetch"),
        working_set_bytes=inputs.number("working_set_gib", above=True) * GIB,
        stride_bytes=stride,
        smt=smt,
    )


def _tier_rates(numbers: MachineRates) -> TierRates:
    latencies = [numbers.latency_ns(tier) for tier in ("ldram", "cxl")]
    rates = (numbers.read_bytes_per_s("ldram"), numbers.read_bytes_per_s("cxl"))
    first, second = latencies
    if first is None or second is None or UNBOUND in rates:
        raise ValueError(
            f"machine {numbers.machine.name} has no table of bandwidths and latencies of ldram and "
            "cxl, which interleaving needs"
        )
    return TierRates(rates, (first, second))


def tiers_of_machine(name: str, *, snc: int) -> tuple[MixedTiers, int]:
    """The socket of a machine file with variants ``snc`` and ``prefetch``, and its cores.

    Raises
    ------
    ConfigError
        No such machine, or it has no such variant or choice.
    ValueError
        Its file lacks a bandwidth or latency.
    """
    on, off = (
        MachineRates(load_machine(name, variant={"snc": snc, "prefetch": prefetch}))
        for prefetch in (True, False)
    )
    cache = on.machine.node(on.machine.initiator).llc_bytes or 0
    return MixedTiers(_tier_rates(on), _tier_rates(off), float(cache)), on.cores()


def _interleave_speedup(inputs: Inputs) -> Answer:
    metrics = ("speedup", "gain_over_cxl_peak", "best_weights", "smt_gain")
    metric = inputs.choice("metric", metrics)
    tiers, cores = tiers_of_machine(machine_name(inputs), snc=inputs.integer("snc", low=1))
    loop = loop_of_case(inputs, cores)
    if "weights" in inputs and metric in ("speedup", "gain_over_cxl_peak"):
        dram, cxl = inputs.numbers("weights", length=2)
        weights = (dram, cxl)
    else:
        grid_total = inputs.integer("grid_total", low=1)
        if metric == "smt_gain":
            return Answer(mixed_tier.smt_gain(tiers, loop, grid_total=grid_total))
        best = mixed_tier.best_mix(tiers, loop, grid_total=grid_total)
        if metric == "best_weights":
            return Answer(list(best))
        weights = best
    if metric == "speedup":
        return Answer(mixed_tier.speedup(tiers, loop, weights))
    return Answer(mixed_tier.gain_over_cxl(tiers, loop, weights))


MODELS = (
    PublicModel(
        "interleave_bandwidth",
        ("bandwidth_gb_s", "bandwidth_gib_s", "weights", "latency_ns", "lines_in_flight"),
        _interleave_bandwidth,
    ),
    PublicModel(
        "optimal_shares",
        ("bandwidth_gb_s", "bandwidth_gib_s", "metric", "grid_total"),
        _optimal_shares,
    ),
    PublicModel("latency_factor", ("latency_ns", "weights"), _latency_factor),
    PublicModel(
        "interleave_speedup",
        (
            "snc", "prefetch", "threads", "lines_in_flight_per_core", "smt", "access", "pattern",
            "element_bytes", "stride_bytes", "working_set_gib", "weights", "grid_total", "metric",
        ),
        _interleave_speedup,
    ),
    PublicModel(
        "loaded_latency",
        ("idle_latency_ns", "peak_gb_s", "lines_in_flight", "calibration", "concurrency_ratio"),
        _loaded_latency,
    ),
    PublicModel("concurrency", ("threads", "bandwidth_gb_s", "latency_ns"), _concurrency),
)  # fmt: skip
