"""Rates of a profile take the place of an engine's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cxl_offload.plan.decoding.engine import STOCK, TRANSFORMERS, EngineRates, RowCosts
from cxl_offload.plan.decoding.measured import measured_engine
from cxl_offload.plan.decoding.phases import decode_gpu_seconds
from cxl_offload.plan.flexgen.decode_time import CALLS
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest
from cxl_offload.plan.gpu import LAYER_S, PREFILL_EFFICIENCY
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.transformers.job import decoder_job
from cxl_offload.plan.transformers.plan import (
    Transformers,
    TransformersRequest,
    plan_transformers,
)
from cxl_offload.profile.operators.gated_layer import elements_of
from cxl_offload.profile.operators.model import (
    PIECE_CALLS,
    CachePoint,
    CacheTypePoint,
    Estimate,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
    PiecePoint,
    ProductPoint,
)
from cxl_offload.topology import load_machine

MIB = 1 << 20


def exactly(seconds: float) -> Estimate:
    return Estimate(seconds, seconds, seconds, 1)


def operators(*, flops: float, bytes_per_s: float, attention: float) -> OperatorProfile:
    """Two threads that together reach so much arithmetic and so many bytes a second."""
    linears = tuple(
        LinearPoint(rows, size, exactly(max(size / bytes_per_s, rows * size / flops)))
        for size in (MIB, 16 * MIB)
        for rows in (1, 8, 64)
    )
    caches = (CachePoint("attention in place", 64 * MIB, exactly(64 * MIB / attention)),)
    layers = (LayerPoint(1, 64, exactly(1e-6), exactly(1e-8)),)
    return OperatorProfile(device="cpu", threads=2, linears=linears, caches=caches, layers=layers)


def test_rates_are_those_of_the_profile() -> None:
    made = measured_engine(
        TRANSFORMERS,
        operators(flops=80e9, bytes_per_s=10e9, attention=15e9),
        read_bytes_per_s=20e9,
        cores=2,
        width=64,
    )
    assert made.products_flops_per_core == pytest.approx(40e9)
    assert made.products_share == pytest.approx(0.5)
    assert made.attention_share == pytest.approx(0.75)
    stock = measured_engine(
        STOCK,
        operators(flops=8e9, bytes_per_s=1e9, attention=1e9),
        read_bytes_per_s=20e9,
        cores=2,
        width=64,
    )
    assert stock.attention_flops_per_core == STOCK.attention_flops_per_core


def with_products(seconds: Callable[[int, int], float]) -> OperatorProfile:
    points = tuple(
        ProductPoint(rows, size, exactly(seconds(rows, size)))
        for size in (2 * MIB, 8 * MIB, 32 * MIB)
        for rows in (1, 16, 256, 1024)
    )
    measured = operators(flops=80e9, bytes_per_s=10e9, attention=15e9)
    return replace(measured, products=points)


def engine_of(profile: OperatorProfile, matrices: Sequence[tuple[int, int]]) -> EngineRates:
    return measured_engine(
        TRANSFORMERS, profile, read_bytes_per_s=16e9, cores=2, width=64, matrices=matrices
    )


def test_products_are_their_bytes_and_their_arithmetic() -> None:
    """What was measured for few rows is taken apart again, exactly."""
    profile = with_products(lambda rows, size: size / 8e9 + rows * size / 160e9)
    made = engine_of(profile, [(2 * MIB, 4), (8 * MIB, 3)])
    assert made.products_share == pytest.approx(0.5)
    assert made.products_flops_per_core == pytest.approx(80e9)
    assert made.prefill_flops_per_core == pytest.approx(80e9)
    assert made.layer_s == pytest.approx(73e-6 + 2926e-8 + TRANSFORMERS.attention_call_s)


def test_products_are_those_of_matrices_as_large_as_the_models() -> None:
    profile = with_products(
        lambda rows, size: size / (2e9 if size < 4 * MIB else 8e9) + rows * 1e-5
    )
    small, large = (engine_of(profile, [(size, 1)]) for size in (2 * MIB, 32 * MIB))
    assert small.products_share == pytest.approx(2 / 16)
    assert large.products_share == pytest.approx(8 / 16)


def test_rows_of_a_layer_are_what_many_cost_more_than_one() -> None:
    """Pieces that are lines over rows and bytes are found again, whatever a call takes."""
    row = {"norm": 2e-6, "rotary": 4e-6, "gate": 3e-6, "logits": 8e-6, "store": 5e-6}
    each = elements_of(1)
    attention = {"short attention": 1e-5, "long attention": 1e-5}
    per_number = 2 / 8e9
    points = []
    for rows in (1, 16, 64):
        for piece, cost in {**row, **attention}.items():
            cached = each[piece] * per_number if piece in attention else 0.0
            taken = exactly(4.1e-5 + rows * (cost + cached))
            points.append(PiecePoint(piece, rows, each[piece], taken))
    for piece, count in elements_of(128).items():
        if piece in ("norm", "rotary", "gate", "prompt store", "prompt attention"):
            points.append(PiecePoint(piece, 1024, count, exactly(1024 * count * 1e-9)))
    profile = replace(with_products(lambda rows, size: size / 8e9), pieces=tuple(points))
    made = engine_of(profile, [(2 * MIB, 1)])
    assert made.decode_rows.norm == pytest.approx(2e-6 / each["norm"])
    assert made.decode_rows.gate == pytest.approx(3e-6 / each["gate"])
    assert made.decode_rows.logits == pytest.approx(8e-6 / each["logits"])
    assert made.decode_rows.attention == pytest.approx((1e-5 + 5e-6) / each["norm"])
    assert made.attention_call_s == pytest.approx(4.1e-5)
    assert made.attention_share == pytest.approx(0.5)
    assert made.prompt_rows.rotary == pytest.approx(1e-9)
    assert made.prompt_rows.attention == pytest.approx(1e-9)
    assert made.prompt_attention_flops_per_core == pytest.approx(1e9 / 2)
    assert made.call_s == pytest.approx((3 * 4.1e-5 + 9e-6) / PIECE_CALLS)


def with_cache_types(profile: OperatorProfile) -> OperatorProfile:
    """Attention at 8 GB/s, at 2 GB/s over codes, and 24 GFLOP/s where eight heads share keys."""
    points = (
        CacheTypePoint("", 1, 16 * MIB, 16 * MIB, exactly(16 * MIB / 8e9)),
        CacheTypePoint("", 8, 16 * MIB, 128 * MIB, exactly(128 * MIB / 24e9)),
        CacheTypePoint("int4", 1, 4 * MIB, 16 * MIB, exactly(4 * MIB / 2e9)),
    )
    return replace(profile, cache_types=points)


def test_attention_over_other_types_reaches_what_was_measured() -> None:
    profile = with_cache_types(operators(flops=80e9, bytes_per_s=10e9, attention=15e9))
    made = engine_of(profile, [(2 * MIB, 1)])
    assert made.attention_flops_per_core == pytest.approx(12e9)
    assert made.kv_type_shares == pytest.approx({"int4": 0.25})
    model = load_model("llama-3-8b")
    codes, floats = (
        decoder_job(model, prompt=64, generated=8, engine=made, kv_dtype=name)
        for name in ("int4", "float8_e5m2")
    )
    assert codes.engine.attention_share == pytest.approx(made.attention_share / 4)
    assumed = KV_TYPES["float8_e5m2"].reached
    assert floats.engine.attention_share == pytest.approx(made.attention_share * assumed)


def test_plan_says_what_is_assumed_of_a_smaller_type_until_it_is_measured() -> None:
    asked = TransformersRequest(
        model=load_model("llama-3-8b"),
        machine=load_machine("xeon8468"),
        prompt=512,
        generated=64,
        model_name="llama-3-8b",
        replay=None,
        prices=False,
        kv_dtypes=("int4",),
    )
    measured = with_cache_types(operators(flops=80e9, bytes_per_s=10e9, attention=15e9))
    said = [
        any("attention over int4 is assumed" in note for note in plan.notes)
        for plan in (
            make_plan(Transformers(each, "int4"))
            for each in (asked, replace(asked, operators=measured))
        )
    ]
    assert said == [True, False]


def test_a_step_of_measured_rows_is_the_sum_of_its_parts() -> None:
    """Where CPUs compute, a row costs what the equations say, and a LLaMA's more than an OPT's."""
    asked = TransformersRequest(
        model=load_model("llama-2-7b"),
        machine=load_machine("xeon8468"),
        prompt=64,
        generated=32,
        model_name="llama-2-7b",
        replay=None,
        prices=False,
    )
    job = Transformers(asked).job
    model = job.model
    costs = RowCosts(norm=1e-9, rotary=2e-9, gate=3e-9, attention=4e-9, logits=5e-9)
    layer = 4096 * 1e-9 + 2 * 4096 * 2e-9 + 11008 * 3e-9 + 4096 * 4e-9
    assert job.row_s(costs) == pytest.approx(32 * layer + 32000 * 5e-9)
    assert job.last_params == model.vocab * model.hidden


@pytest.mark.parametrize("machine", ["epyc9354-cxl-a", "xeon8468"])
def test_step_of_a_small_model_takes_as_long_as_its_calls(machine: str) -> None:
    plan = plan_transformers(
        TransformersRequest(
            model=load_model("opt-125m"),
            machine=load_machine(machine),
            prompt=16,
            generated=64,
            model_name="opt-125m",
            replay=None,
            prices=False,
            most_batches=1,
        )
    )
    least = 12 * TRANSFORMERS.layer_s * plan.batch.count
    assert plan.phases[-1].seconds >= least
    assert plan.tokens_per_s <= plan.batch.size * plan.batch.count / least * 64 / 63


def test_plan_follows_the_profile() -> None:
    asked = TransformersRequest(
        model=load_model("llama-3-8b"),
        machine=load_machine("xeon8468"),
        prompt=128,
        generated=64,
        model_name="llama-3-8b",
        replay=None,
        prices=False,
    )
    slow, fast = (
        plan_transformers(
            replace(asked, operators=operators(flops=flops, bytes_per_s=2e11, attention=2e11))
        )
        for flops in (20e9, 400e9)
    )
    assert fast.tokens_per_s > 5 * slow.tokens_per_s
    assert any("measured with 2 threads" in note for note in fast.notes)


def test_cpus_in_the_place_of_a_gpu_do_one_thing_after_the_other() -> None:
    asked = InferenceRequest(
        model=load_model("opt-1.3b"),
        machine=load_machine("epyc9354-cxl-a"),
        prompt=64,
        generated=32,
        model_name="opt-1.3b",
        replay=None,
        prices=False,
        operators=operators(flops=80e9, bytes_per_s=10e9, attention=15e9),
    )
    beside, in_turn = (FlexGen(replace(asked, accelerator=each)) for each in ("cuda", "host"))
    hardware = in_turn.hardware()
    job, gpu = in_turn.job, hardware.gpu
    nbytes = job.weight_bytes / gpu.memory_bytes_per_s
    flops = 2 * job.params * 8 / (gpu.flops_per_s * PREFILL_EFFICIENCY)
    calls, instructions = CALLS["host, in place"]
    between = job.layers * (calls * 1e-6 + instructions * 1e-8)
    assert decode_gpu_seconds(job, hardware, 8) == pytest.approx(nbytes + flops + between)
    kernels = max(nbytes, flops) + job.layers * LAYER_S
    assert decode_gpu_seconds(beside.job, hardware, 8) == pytest.approx(kernels)
