"""Public models of LLM inference: footprints, FlexGen and vLLM with offload."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cxl_offload.plan.exact import exact
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.vllm import offload as vllm_offload
from cxl_offload.units import GB, GIB
from cxl_offload.validation import flexgen_search, footprint, offload_sizes
from cxl_offload.validation.answers import (
    HALF_PRECISION_BYTES,
    LLM_KEYS,
    LLM_SHAPE,
    Answer,
    PublicModel,
    machine_numbers,
)
from cxl_offload.validation.flexgen_shape import (
    ShapeOnTiers,
    Throughput,
    hardware_of_tiers,
    throughput,
)
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.pages import spread_evenly


def _shape(inputs: Inputs) -> footprint.LlmShape:
    llm = inputs.nested("llm", LLM_SHAPE)
    return footprint.LlmShape(
        params=llm.number("params", above=True),
        layers=llm.integer("layers", low=1),
        width=llm.integer("width", low=1),
        heads=llm.integer("heads", low=1),
        kv_heads=llm.integer("kv_heads", low=1),
    )


def _llm(inputs: Inputs) -> tuple[footprint.LlmShape, footprint.ElementBytes, footprint.Lengths]:
    sizes = footprint.ElementBytes(
        weights=inputs.number("weight_bytes"),
        kv=inputs.number("kv_bytes"),
        activations=inputs.number("activation_bytes"),
    )
    lengths = footprint.Lengths(inputs.integer("prompt_len"), inputs.integer("gen_len"))
    return _shape(inputs), sizes, lengths


def _footprint(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("total_gib", "host_gib", "kv_gib_per_sequence"))
    llm, sizes, lengths = _llm(inputs)
    if metric == "kv_gib_per_sequence":
        return Answer(footprint.kv_bytes_per_sequence(llm, sizes, lengths) / GIB)
    batch = inputs.integer("batch")
    if metric == "total_gib":
        return Answer(footprint.total_bytes(llm, sizes, lengths, batch=batch) / GIB)
    share = inputs.fraction("kv_gpu_fraction")
    on_host = footprint.host_bytes(llm, sizes, lengths, batch=batch, kv_gpu_fraction=share)
    return Answer(on_host / GIB)


def _max_batch(inputs: Inputs) -> Answer:
    llm, sizes, lengths = _llm(inputs)
    usable = exact(inputs.number("host_capacity_gib")) * exact(inputs.fraction("usable_fraction"))
    batch = footprint.max_batch(
        llm,
        sizes,
        lengths,
        host_capacity_bytes=usable * GIB,
        gpu_kv_bytes=exact(inputs.number("gpu_kv_gib")) * GIB,
    )
    return Answer(batch)


@dataclass(frozen=True, slots=True)
class _Offered:
    """Capacities of ``tiers_gib`` in bytes: host tiers in the order of the file, and the drive."""

    host: dict[str, float]
    drive: float | None


def _offered(inputs: Inputs) -> _Offered:
    tiers = {tier: gib * GIB for tier, gib in inputs.named_numbers("tiers_gib").items()}
    drive = tiers.pop("nvme", None)
    if sum(tiers.values()) <= 0:
        raise ValueError("tiers_gib offers no host memory; FlexGen stages everything there")
    return _Offered(tiers, drive)


def _flexgen_search(inputs: Inputs) -> Answer:
    inputs.choice("metric", ("batch",))
    llm, sizes, lengths = _llm(inputs)
    numbers = machine_numbers(inputs)
    offered = _offered(inputs)
    request = flexgen_search.SearchRequest(
        llm=llm,
        sizes=sizes,
        lengths=lengths,
        host_capacity_bytes=tuple(offered.host.values()),
        gpu_memory_bytes=inputs.number("gpu_memory_gib") * GIB,
        drive_capacity_bytes=offered.drive or 0.0,
        weights_gpu_fraction=inputs.fraction("weights_gpu_fraction"),
        activations_gpu_fraction=inputs.fraction("activations_gpu_fraction"),
    )
    found = flexgen_search.search(request, hardware_of_tiers(numbers, list(offered.host)))
    notes = tuple(numbers.notes)
    if found is None:
        return Answer(0, (*notes, "no batch fits"))
    place = found.placement
    chosen = f"GPU batch {place.gpu_batch}, {place.kv_gpu_fraction:.1%} of KV on the GPU"
    return Answer(place.batch, (chosen, *notes))


_ROUNDING = 0.02
"""By so much a batch that is known to have run may seem not to fit: sizes are printed in whole GB,
and a model's shape leaves out biases and norms."""


def _interleaved(
    case: Inputs,
    llm: footprint.LlmShape,
    sizes: footprint.ElementBytes,
    lengths: footprint.Lengths,
) -> tuple[list[str], ShapeOnTiers]:
    """Host tiers and the placement of ``a`` or ``b``: spread evenly, full tiers passed over."""
    offered = _offered(case)
    batch, on_gpu = case.integer("batch", low=1), case.fraction("kv_gpu_fraction")
    capacities = [*offered.host.values(), *([] if offered.drive is None else [offered.drive])]
    need = footprint.host_bytes(llm, sizes, lengths, batch=batch, kv_gpu_fraction=on_gpu)
    if sum(capacities) < need <= sum(capacities) * (1 + _ROUNDING):
        need = sum(capacities)
    try:
        placed = spread_evenly(need, capacities)
    except ValueError as error:
        raise ValueError(
            f"{case.where}: batch {batch} needs {need / GIB:.4g} GiB of host memory, the tiers "
            f"offer {sum(capacities) / GIB:.4g} GiB"
        ) from error
    shares = tuple(amount / need for amount in placed)
    hosts = len(offered.host)
    place = ShapeOnTiers(
        batch=batch,
        host_shares=shares[:hosts],
        drive_share=sum(shares[hosts:]),
        kv_gpu_fraction=on_gpu,
    )
    return list(offered.host), place


def _rates(inputs: Inputs, key: str, numbers: MachineRates, drive: float | None) -> Throughput:
    llm, sizes, lengths = _llm(inputs)
    case = inputs.nested(key, ("tiers_gib", "batch", "kv_gpu_fraction"))
    tiers, place = _interleaved(case, llm, sizes, lengths)
    if place.drive_share > 0 and drive is None:
        raise ValueError(f"{case.where} uses nvme: 'nvme_read_gb_s' is missing in inputs")
    machine = hardware_of_tiers(numbers, tiers, drive_read_bytes_per_s=drive)
    return throughput(machine, llm, sizes, lengths, place)


def _flexgen_throughput_ratio(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", ("prefill_ratio", "decode_ratio", "overall_ratio"))
    inputs.choice("placement", ("interleave",))
    numbers = machine_numbers(inputs)
    drive = None
    if "nvme_read_gb_s" in inputs:
        drive = inputs.number("nvme_read_gb_s", above=True) * GB
    first, second = (_rates(inputs, key, numbers, drive) for key in ("a", "b"))
    pairs = {
        "prefill_ratio": (first.prefill, second.prefill),
        "decode_ratio": (first.decode, second.decode),
        "overall_ratio": (first.overall, second.overall),
    }
    over, under = pairs[metric]
    return Answer(over / under, tuple(numbers.notes))


def _all_weights_bytes(inputs: Inputs, llm: footprint.LlmShape) -> float:
    """``weights_gib``, or the parameters in half precision where it is not given."""
    if "weights_gib" in inputs:
        return inputs.number("weights_gib", above=True) * GIB
    return llm.params * HALF_PRECISION_BYTES


def _vllm_case(inputs: Inputs) -> vllm_offload.WeightOffload:
    llm = _shape(inputs)
    sizes = footprint.ElementBytes(weights=0, kv=inputs.number("kv_bytes"), activations=0)
    return vllm_offload.WeightOffload(
        params=llm.params,
        weight_bytes=_all_weights_bytes(inputs, llm),
        kv_bytes_per_token=footprint.kv_bytes_per_token(llm, sizes),
        gpu_memory_bytes=inputs.number("gpu_memory_gib", above=True) * GIB,
        usable_fraction=inputs.fraction("usable_fraction"),
        gpu_reserved_bytes=inputs.number("gpu_reserved_gib") * GIB,
        gpu=GpuRates(
            flops_per_s=inputs.number("gpu_tflops", above=True) * 1e12,
            memory_bytes_per_s=inputs.number("gpu_memory_gb_s", above=True) * GB,
        ),
        mean_tokens_per_sequence=inputs.number("mean_tokens_per_sequence", above=True),
        max_running_sequences=inputs.number("max_running_sequences", above=True),
        link_bytes_per_s=inputs.number("link_gb_s", above=True) * GB,
    )


def _vllm_weight_offload(inputs: Inputs) -> Answer:
    metrics = ("tokens_per_s", "best_offload_gib", "copy_fraction", "throughput_ratio")
    metric = inputs.choice("metric", metrics)
    case = _vllm_case(inputs)
    if metric in ("tokens_per_s", "copy_fraction"):
        offload = inputs.number("offload_gib") * GIB
        if metric == "copy_fraction":
            return Answer(offload_sizes.copy_fraction(case, offload))
        rate = vllm_offload.tokens_per_s(case, offload)
        return Answer(rate, () if rate else ("no GPU memory is left for KV cache",))
    grid = inputs.numbers("offload_grid_gib")
    if metric == "best_offload_gib":
        by_bytes = {gib * GIB: gib for gib in grid}
        return Answer(by_bytes[offload_sizes.best_offload_bytes(case, list(by_bytes))])
    other = replace(case, link_bytes_per_s=inputs.number("other_link_gb_s", above=True) * GB)
    ratio = offload_sizes.mean_throughput_ratio(case, other, [gib * GIB for gib in grid])
    return Answer(ratio)


MODELS = (
    PublicModel("footprint", (*LLM_KEYS, "batch", "kv_gpu_fraction", "metric"), _footprint),
    PublicModel(
        "max_batch", (*LLM_KEYS, "host_capacity_gib", "usable_fraction", "gpu_kv_gib"), _max_batch
    ),
    PublicModel(
        "flexgen_search",
        (
            *LLM_KEYS, "tiers_gib", "gpu_memory_gib", "weights_gpu_fraction",
            "activations_gpu_fraction", "metric",
        ),
        _flexgen_search,
    ),
    PublicModel(
        "flexgen_throughput_ratio",
        (*LLM_KEYS, "placement", "a", "b", "nvme_read_gb_s", "metric"),
        _flexgen_throughput_ratio,
    ),
    PublicModel(
        "vllm_weight_offload",
        (
            "llm", "kv_bytes", "weights_gib", "gpu_memory_gib", "usable_fraction",
            "gpu_reserved_gib", "gpu_memory_gb_s", "gpu_tflops", "mean_tokens_per_sequence",
            "max_running_sequences", "link_gb_s", "other_link_gb_s", "offload_gib",
            "offload_grid_gib", "metric",
        ),
        _vllm_weight_offload,
    ),
)  # fmt: skip
