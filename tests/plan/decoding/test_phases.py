from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.phases import Phases, phases_of_block
from cxl_offload.plan.flexgen.job import FlexGenJob, WeightGroup
from cxl_offload.plan.gpu import LAYER_S, PREFILL_EFFICIENCY, GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode


def node(at: int, name: str, rate: float, latency_ns: float) -> HostNode:
    return HostNode(
        name=name,
        tier=name,
        node=at,
        usable_bytes=1e12,
        read_bytes_per_s=rate,
        latency_ns=latency_ns,
        copy_bytes_per_s=rate,
    )


NODES = (node(0, "ldram", 400e9, 140), node(1, "cxl", 40e9, 290))
MACHINE = Hardware("made", NODES, 25e9, 140, GpuRates(125e12, 600e9), 24e9, 19e9, 32)
PARAMS = 30_000_000_000
JOB = FlexGenJob(
    groups=(WeightGroup(((PARAMS,),), 1),),
    params=PARAMS,
    layers=48,
    width=7168,
    heads=56,
    kv_width=7168,
    vocab=50_000,
    prompt=512,
    generated=32,
)
WEIGHTS = 2.0 * PARAMS
KERNELS_S = WEIGHTS / 600e9 + 48 * LAYER_S


def block(
    shares: tuple[float, ...] = (0.5, 0.5), *, kv_gpu: float = 0.0, batches: int = 1
) -> Block:
    """Half of everything striped on CXL by default."""
    drive = 1 - sum(shares)
    of_host = tuple(share / sum(shares) for share in shares)
    return Block(
        sequences=16,
        batches=batches,
        gpu_batch=16 // batches,
        weights_drive=WEIGHTS * drive,
        weights_host=tuple(WEIGHTS * share for share in shares),
        weight_shares=of_host,
        kv_drive=drive * (1 - kv_gpu),
        kv_host=tuple(share * (1 - kv_gpu) for share in shares),
        kv_gpu=kv_gpu,
        kv_shares=of_host,
        activations_gpu=1.0,
    )


def phases(made: Block, machine: Hardware = MACHINE, job: FlexGenJob = JOB) -> Phases:
    return phases_of_block(job, machine, made)


def test_decoded_token_with_kv_on_the_gpu_is_weights_over_the_link_and_gpu_memory() -> None:
    found = phases(block((1.0, 0.0), kv_gpu=1.0))
    kv = 16 * JOB.mean_kv_tokens * JOB.kv_bytes_per_token
    assert found.decode_token_s == pytest.approx(WEIGHTS / 25e9 + KERNELS_S + kv / 600e9)


def test_no_term_is_of_attention_on_cpus_where_the_gpu_has_the_whole_cache() -> None:
    whole, most = (phases(block((1.0, 0.0), kv_gpu=share)).decode_terms for share in (1.0, 0.9))
    assert "GPU work" in whole
    assert not [name for name in whole if "CPU" in name]
    assert "GPU work + CPU attention (memory)" in most


def test_cpu_attention_is_bound_by_arithmetic_or_by_the_slowest_node() -> None:
    terms = phases(block()).decode_terms
    tokens = 16 * JOB.mean_kv_tokens
    flops, kv = 4 * tokens * 7168 * 48, tokens * JOB.kv_bytes_per_token
    arithmetic = terms["GPU work + CPU attention (arithmetic)"] - KERNELS_S
    memory = terms["GPU work + CPU attention (memory)"] - KERNELS_S
    assert arithmetic == pytest.approx(flops / (32 * 12.3e9 / 16))
    assert memory == pytest.approx(kv / 80e9 + 8 * (kv / 2) / 400e9)


def test_kv_stores_slow_down_with_the_latency_of_what_they_write() -> None:
    local, mixed = (phases(block(shares)).prefill_terms for shares in ((1.0, 0.0), (0.5, 0.5)))
    assert mixed["KV stores"] / local["KV stores"] == pytest.approx((140 + 290) / 2 / 140)


def test_prefill_of_a_long_prompt_on_the_gpu_alone_is_its_arithmetic() -> None:
    long = replace(JOB, prompt=2048, generated=2)
    found = phases(block((1.0, 0.0), kv_gpu=1.0), job=long)
    dense = 2 * PARAMS * 16 * 2048
    attention = 4 * 16 * 2048**2 * 7168 * 48
    assert found.prefill_s == pytest.approx((dense + attention) / (125e12 * PREFILL_EFFICIENCY))


@given(st.floats(0, 1), st.floats(0, 1))
def test_more_on_cxl_is_never_faster(first: float, second: float) -> None:
    less, more = sorted((first, second))
    fast, slow = phases(block((1 - less, less))), phases(block((1 - more, more)))
    assert slow.prefill_s >= fast.prefill_s * (1 - 1e-9)
    assert slow.decode_token_s >= fast.decode_token_s * (1 - 1e-9)


def test_smaller_gpu_batches_read_the_weights_and_start_the_kernels_more_often() -> None:
    whole, halves = (phases(block(kv_gpu=1.0, batches=batches)) for batches in (1, 2))
    assert halves.decode_token_s - whole.decode_token_s == pytest.approx(KERNELS_S)


def test_phases_add_up_to_the_overall_rate() -> None:
    found = phases(block())
    seconds = found.prefill_s + 31 * found.decode_token_s
    assert found.tokens_per_s == pytest.approx(16 * 32 / seconds)


def test_drive_needs_a_rate_and_slows_both_phases() -> None:
    place = block((0.5, 0.2))
    with pytest.raises(ValueError, match="nvme"):
        phases(place)
    with_drive = replace(MACHINE, drive_read_bytes_per_s=7e9, drive_write_bytes_per_s=7e9)
    slow, fast = phases(place, with_drive), phases(block((0.8, 0.2)))
    assert slow.decode_token_s > fast.decode_token_s
    assert slow.prefill_s > fast.prefill_s
