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
