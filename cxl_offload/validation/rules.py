"""Public models that are exact rules: pages, objects, threads, Caption, TCO, switch trees."""

from __future__ import annotations

from cxl_offload.plan.equations import oli, tco, threads
from cxl_offload.sim import Fabric, SwitchLink
from cxl_offload.tune import caption
from cxl_offload.validation import pages
from cxl_offload.validation.answers import Answer, PublicModel
from cxl_offload.validation.caption_replay import replay_on_bandwidth, replay_on_states
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.thread_assignment import assign_threads

WHOLE_PERCENT = 100.0


def _ratio_change(inputs: Inputs) -> Answer:
    """How far a DRAM:CXL ratio moved; negative towards DRAM (Lebedev et al., 6.3)."""
    old_dram, old_cxl = inputs.numbers("from_weights", length=2)
    new_dram, new_cxl = inputs.numbers("to_weights", length=2)
    if old_dram == 0 or new_cxl == 0:
        raise ValueError(
            f"ratio change {old_dram}:{old_cxl} -> {new_dram}:{new_cxl}: unbounded when the first "
            "has no DRAM or the second no CXL"
        )
    return Answer(1.0 - (new_dram * old_cxl) / (new_cxl * old_dram))


def _weights_to_pages(inputs: Inputs) -> Answer:
    total = inputs.integer("pages")
    capacity = inputs.integers("capacity_pages") if "capacity_pages" in inputs else None
    placed = pages.weighted_pages(inputs.integers("weights"), total, capacity_pages=capacity)
    left = total - sum(placed)
    notes = (f"{left} of {total} pages find every node of their weights full",) if left else ()
    return Answer(list(placed), notes)


def _thread_assignment(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("threads", "total_gb_s"))
    tiers = [
        threads.ThreadedTier(
            node=tier.text("node"),
            per_thread_bytes_per_s=tier.number("per_thread_gb_s"),
            peak_bytes_per_s=tier.number("peak_gb_s"),
        )
        for tier in inputs.nested_list("tiers", ("node", "per_thread_gb_s", "peak_gb_s"))
    ]  # rates stay in GB/s: the assignment does not depend on the unit
    assigned = assign_threads(tiers, inputs.integer("total_threads"))
    if metric == "threads":
        return Answer(list(assigned))
    return Answer(sum(map(threads.threaded_bandwidth, tiers, assigned)))


def _tco(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("ratio_and_saving", "break_even_server_cost", "times"))
    needs_cost = metric == "ratio_and_saving"
    parameters = tco.TcoInputs(
        rl_d=inputs.number("rl_d"),
        rl_c=inputs.number("rl_c"),
        c=inputs.number("c", above=True),
        r_t=inputs.number("r_t", above=True) if needs_cost or "r_t" in inputs else 1.0,
        form=inputs.choice("form", ("printed", "corrected")),
        n_congest=inputs.optional_number("n_congest", above=True),
        n_threads=inputs.optional_number("n_threads", above=True),
        congestion=inputs.choice("congestion", ("none", "multiply"), "none"),
    )
    if metric == "ratio_and_saving":
        return Answer([tco.server_ratio(parameters), tco.saving(parameters)])
    if metric == "break_even_server_cost":
        return Answer(tco.break_even_server_cost(parameters))
    d, w, n_baseline = (inputs.number(key) for key in ("d", "w", "n_baseline"))
    notes = tco.warnings(parameters, d=d, w=w, n_baseline=n_baseline)
    both = tco.times(parameters, d=d, w=w, n_baseline=n_baseline)
    return Answer(list(both), notes)


def _oli_select(inputs: Inputs) -> Answer:
    return Answer(
        list(
            oli.select_objects(
                inputs.numbers("footprint"),
                inputs.numbers("accesses"),
                min_share=inputs.fraction("min_share"),
                top_k=inputs.integer("top_k"),
            )
        )
    )


def _caption_replay(inputs: Inputs) -> Answer:
    low, high = inputs.numbers("bounds", length=2)
    if low > high or high > WHOLE_PERCENT:
        raise ValueError(f"bounds = [{low:g}, {high:g}], want the lower one first, up to 100")
    rule = caption.CaptionRule(inputs.number("min_abs_step"), low, high)
    start = caption.CaptionState(
        state=inputs.signed("prev_state_init"),
        step=inputs.signed("start_step"),
        ratio=inputs.number("start_ratio", high=WHOLE_PERCENT),
    )
    allocated = inputs.booleans("new_allocations") if "new_allocations" in inputs else None
    if ("states" in inputs) == ("bandwidth" in inputs):
        raise ValueError("give either 'states' or 'bandwidth' with 'periods'")
    if "states" in inputs:
        states = inputs.signed_numbers("states")
        if "periods" in inputs and inputs.integer("periods") != len(states):
            raise ValueError(f"{len(states)} states, but periods = {inputs.integer('periods')}")
        ratios = replay_on_states(rule, start, states, new_allocations=allocated)
    else:
        dram, cxl = inputs.numbers("bandwidth", above=True, length=2)
        ratios = replay_on_bandwidth(
            rule, start, (dram, cxl), inputs.integer("periods"), new_allocations=allocated
        )
    return Answer(list(ratios))


def _inverse_latency_shares(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("shares", "gib_per_node"))
    latencies = inputs.numbers("latency_ns", above=True)
    if metric == "shares":
        return Answer(list(pages.inverse_latency_shares(latencies)))
    placed = pages.local_first(
        inputs.number("size_gib"),
        latencies,
        local_capacity=inputs.number("local_capacity_gib"),
        local_fill_fraction=inputs.fraction("local_fill_fraction"),
    )
    return Answer(list(placed))


def _switch_path(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("latency_ns", "bandwidth_gb_s"))
    if metric == "latency_ns":
        link = SwitchLink(bandwidth_bytes_per_s=1.0, latency_ns=inputs.number("switch_latency_ns"))
        key = "endpoint_latency_ns"
    else:  # rates stay in GB/s: their sum does not depend on the unit
        link = SwitchLink(bandwidth_bytes_per_s=inputs.number("switch_gb_s", above=True))
        key = "endpoint_gb_s"
    tree = Fabric.parse(inputs.text("tree"), every=link)
    values = inputs.named_numbers(key)
    missing = [name for name in tree.above if name not in values]
    if missing:
        raise ValueError(f"endpoint {missing[0]!r} of the tree has no entry in {key}")
    unused = ", ".join(name for name in values if name not in tree.above)
    notes = (f"{key} names {unused}, which the tree does not have",) if unused else ()
    if metric == "latency_ns":
        return Answer([values[name] + tree.latency_ns(name) for name in tree.above], notes)
    return Answer(tree.bandwidth({name: values[name] for name in tree.above}), notes)


MODELS = (
    PublicModel("ratio_change", ("from_weights", "to_weights"), _ratio_change),
    PublicModel("weights_to_pages", ("weights", "pages", "capacity_pages"), _weights_to_pages),
    PublicModel("thread_assignment", ("total_threads", "tiers", "metric"), _thread_assignment),
    PublicModel(
        "tco",
        (
            "rl_d", "rl_c", "c", "r_t", "form", "n_congest", "n_threads", "congestion",
            "metric", "d", "w", "n_baseline",
        ),
        _tco,
    ),
    PublicModel("oli_select", ("footprint", "accesses", "min_share", "top_k"), _oli_select),
    PublicModel(
        "caption_replay",
        (
            "start_ratio", "start_step", "min_abs_step", "bounds", "prev_state_init",
            "states", "bandwidth", "periods", "new_allocations",
        ),
        _caption_replay,
    ),
    PublicModel(
        "inverse_latency_shares",
        ("latency_ns", "metric", "size_gib", "local_capacity_gib", "local_fill_fraction"),
        _inverse_latency_shares,
    ),
    PublicModel(
        "switch_path",
        (
            "tree", "metric", "endpoint_latency_ns", "endpoint_gb_s",
            "switch_latency_ns", "switch_gb_s",
        ),
        _switch_path,
    ),
)  # fmt: skip
