from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations.footprint import ElementBytes, Lengths, LlmShape
from cxl_offload.plan.flexgen import model, terms
from cxl_offload.plan.flexgen.terms import FlexGenMachine, HostTier, Placement
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY, GpuRates

LDRAM = HostTier("ldram", 400e9, 140, 400e9)
CXL = HostTier("cxl", 40e9, 290, 40e9)
MACHINE = FlexGenMachine((LDRAM, CXL), 140, 25e9, GpuRates(125e12, 600e9), 32)
OPT = LlmShape(params=30e9, layers=48, width=7168, heads=56, kv_heads=56)
HALF = ElementBytes(2, 2, 2)
LENGTHS = Lengths(512, 32)
ON_LDRAM = Placement(batch=16, host_shares=(1.0, 0.0))
MIXED = Placement(batch=16, host_shares=(0.5, 0.5))


def rates(machine: FlexGenMachine, place: Placement) -> model.Throughput:
    return model.throughput(machine, OPT, HALF, LENGTHS, place)


def test_decoded_token_without_kv_is_weights_over_the_link_and_through_the_gpu() -> None:
    place = replace(ON_LDRAM, activations_gpu_fraction=1.0)
    seconds = model.decode_seconds_per_token(MACHINE, OPT, HALF, place, kv_tokens=0)
    assert seconds == pytest.approx(60e9 / 25e9 + 60e9 / 600e9)


def test_cpu_attention_is_bound_by_arithmetic_or_by_the_slowest_tier() -> None:
    flops = terms.cpu_attention_seconds(
        MACHINE, (0.5, 0.5), flops=24.6e9, kv_bytes=1, kv_elements=0
    )
    memory = terms.cpu_attention_seconds(
        MACHINE, (0.5, 0.5), flops=1, kv_bytes=80e9, kv_elements=40e9
    )
    assert flops == pytest.approx(1.0)  # 32 cores at 12.3 / 16 GFLOP/s
    assert memory == pytest.approx(80e9 / 80e9 + 8 * 40e9 / 400e9)


def test_kv_stores_slow_down_with_the_latency_of_what_they_write() -> None:
    local = terms.kv_store_seconds(MACHINE, (1.0, 0.0), 1e9)
    mixed = terms.kv_store_seconds(MACHINE, (0.5, 0.5), 1e9)
    assert mixed / local == pytest.approx((140 + 290) / 2 / 140)


def test_prefill_of_a_long_prompt_on_the_gpu_alone_is_its_arithmetic() -> None:
    place = replace(ON_LDRAM, kv_gpu_fraction=1.0)
    seconds = model.prefill_seconds(MACHINE, OPT, HALF, Lengths(2048, 2), place)
    dense = 2 * 30e9 * 16 * 2048
    attention = 4 * 16 * 2048**2 * 7168 * 48
    assert seconds == pytest.approx((dense + attention) / (125e12 * PREFILL_EFFICIENCY))


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_on_cxl_is_never_faster(first: float, second: float) -> None:
    less, more = sorted((first, second))
    fast = rates(MACHINE, replace(MIXED, host_shares=(1 - less, less)))
    slow = rates(MACHINE, replace(MIXED, host_shares=(1 - more, more)))
    for phase in ("prefill", "decode", "overall"):
        assert getattr(slow, phase) <= getattr(fast, phase) * (1 + 1e-9)


def test_more_kv_on_the_gpu_is_faster_and_a_bigger_batch_decodes_more() -> None:
    on_gpu = rates(MACHINE, replace(MIXED, kv_gpu_fraction=0.5))
    assert on_gpu.decode > rates(MACHINE, MIXED).decode
    bigger = rates(MACHINE, replace(MIXED, batch=32))
    assert rates(MACHINE, MIXED).decode < bigger.decode < 2 * rates(MACHINE, MIXED).decode


def test_smaller_gpu_batches_read_the_weights_more_often() -> None:
    whole = model.decode_seconds_per_token(MACHINE, OPT, HALF, MIXED, kv_tokens=0)
    halves = model.decode_seconds_per_token(
        MACHINE, OPT, HALF, replace(MIXED, gpu_batch=8), kv_tokens=0
    )
    assert halves - whole == pytest.approx(60e9 / 600e9)


def test_phases_add_up_to_the_overall_rate() -> None:
    found = rates(MACHINE, MIXED)
    prefill_s, decode_s = 16 / found.prefill, 16 * 31 / found.decode
    assert found.overall == pytest.approx(16 * 32 / (prefill_s + decode_s))


def test_drive_needs_a_rate_and_slows_both_phases() -> None:
    place = replace(MIXED, host_shares=(0.5, 0.2), drive_share=0.3)
    with pytest.raises(ValueError, match="nvme"):
        rates(MACHINE, place)
    with_drive = replace(MACHINE, drive_read_bytes_per_s=7e9)
    slow = rates(with_drive, place)
    without = rates(MACHINE, replace(MIXED, host_shares=(0.8, 0.2)))
    assert slow.decode < without.decode
    assert slow.prefill < without.prefill


@pytest.mark.parametrize("lengths", [Lengths(0, 8), Lengths(8, 1)])
def test_lengths_without_a_phase_raise(lengths: Lengths) -> None:
    with pytest.raises(ValueError, match="generated"):
        model.throughput(MACHINE, OPT, HALF, lengths, MIXED)
