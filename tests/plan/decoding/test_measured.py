"""Rates of a profile take the place of an engine's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.plan.decoding.engine import STOCK, TRANSFORMERS
from cxl_offload.plan.decoding.measured import measured_engine
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.profile.operators.model import (
    CachePoint,
    Estimate,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
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
    )
    assert made.products_flops_per_core == pytest.approx(40e9)
    assert made.products_share == pytest.approx(0.5)
    assert made.attention_share == pytest.approx(0.75)
    stock = measured_engine(
        STOCK, operators(flops=8e9, bytes_per_s=1e9, attention=1e9), read_bytes_per_s=20e9
    )
    assert stock.attention_flops_per_core == STOCK.attention_flops_per_core


def test_products_are_a_call_their_bytes_and_their_arithmetic() -> None:
    """What was measured for few sizes and rows is taken apart again, exactly."""
    points = tuple(
        ProductPoint(rows, size, exactly(1e-4 + size / 8e9 + (rows - 1) * size / 160e9))
        for size in (2 * MIB, 32 * MIB)
        for rows in (1, 16, 256)
    )
    measured = operators(flops=80e9, bytes_per_s=10e9, attention=15e9)
    made = measured_engine(TRANSFORMERS, replace(measured, products=points), read_bytes_per_s=16e9)
    assert made.products_share == pytest.approx(0.5)
    assert made.products_flops_per_core == pytest.approx(80e9)
    assert made.prefill_flops_per_core == pytest.approx(80e9)
    assert made.product_call_s == pytest.approx(1e-4)
    assert made.layer_s == pytest.approx(7e-4 + 73e-6 + 3839e-8)


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
    )
    slow, fast = (
        plan_transformers(
            replace(asked, operators=operators(flops=flops, bytes_per_s=2e11, attention=2e11))
        )
        for flops in (20e9, 400e9)
    )
    assert fast.tokens_per_s > 5 * slow.tokens_per_s
    assert any("measured with 2 threads" in note for note in fast.notes)
