from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.gpu import PREFILL_EFFICIENCY, GpuRates
from cxl_offload.plan.vllm import offload as vllm_offload

GIB = 2**30
CASE = vllm_offload.WeightOffload(
    params=70e9,
    weight_bytes=130 * GIB,
    kv_bytes_per_token=2 * 80 * 1024 * 2,
    gpu_memory_bytes=80 * GIB,
    usable_fraction=0.9,
    gpu_reserved_bytes=2 * GIB,
    gpu=GpuRates(756e12, 2000e9),
    mean_tokens_per_sequence=356,
    max_running_sequences=230,
    link_bytes_per_s=55e9,
)


@given(st.floats(0, 130))
def test_gpu_memory_is_never_overcommitted(offload_gib: float) -> None:
    offload = offload_gib * GIB
    resident = CASE.weight_bytes - offload
    kv = vllm_offload.running_sequences(CASE, offload) * 356 * CASE.kv_bytes_per_token
    if kv > 0:
        assert resident + kv + CASE.gpu_reserved_bytes <= 0.9 * 80 * GIB * (1 + 1e-12)


@given(st.floats(61, 130), st.floats(1e9, 1e12), st.floats(1.01, 10))
def test_faster_link_helps_by_at_most_its_factor(
    offload_gib: float, link: float, factor: float
) -> None:
    slow = replace(CASE, link_bytes_per_s=link)
    fast = replace(CASE, link_bytes_per_s=link * factor)
    ratio = vllm_offload.tokens_per_s(fast, offload_gib * GIB) / vllm_offload.tokens_per_s(
        slow, offload_gib * GIB
    )
    assert 1 <= ratio <= factor


def test_tokens_per_s_with_a_slow_link_is_sequences_over_copy_time() -> None:
    slow = replace(CASE, link_bytes_per_s=1e6)
    sequences = 10 * GIB / (356 * CASE.kv_bytes_per_token)
    expected = sequences / (70 * GIB / 1e6)
    assert vllm_offload.tokens_per_s(slow, 70 * GIB) == pytest.approx(expected, rel=1e-4)


def test_step_without_offload_reads_weights_and_kv_once() -> None:
    roomy = replace(CASE, gpu_memory_bytes=400 * GIB)
    sequences = 230
    nbytes = 130 * GIB + sequences * 356 * CASE.kv_bytes_per_token
    assert vllm_offload.step_seconds(roomy, 0) == pytest.approx(nbytes / 2000e9)


def test_many_sequences_are_bound_by_arithmetic() -> None:
    crowd = replace(
        CASE, gpu_memory_bytes=1e15, max_running_sequences=1e5, gpu=GpuRates(1e12, 1e15)
    )
    assert vllm_offload.compute_seconds_per_step(crowd, 0) == pytest.approx(
        2 * 70e9 * 1e5 / (PREFILL_EFFICIENCY * 1e12)
    )


def test_no_room_for_kv_decodes_nothing() -> None:
    assert vllm_offload.tokens_per_s(CASE, 10 * GIB) == 0


def test_more_offload_than_weights_raises() -> None:
    with pytest.raises(ValueError, match="0 <= offload <= weights"):
        vllm_offload.tokens_per_s(CASE, 131 * GIB)
