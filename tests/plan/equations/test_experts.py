"""Experts that tokens ask for: against drawing them, and in the plans that read them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cxl_offload.plan.equations.experts import asked_share, leaves_an_expert
from cxl_offload.plan.gpu import LAYER_S, MEMORY_SHARE, SEQUENCE_S
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.job import decoder_job
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine


@pytest.mark.parametrize(("experts", "each"), [(8, 2), (64, 6), (128, 8), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_share_is_the_mean_of_draws(experts: int, each: int, tokens: int) -> None:
    draw = random.Random(f"{experts} {each} {tokens}")
    found = [
        len({one for _ in range(tokens) for one in draw.sample(range(experts), each)}) / experts
        for _ in range(4000)
    ]
    assert asked_share(each / experts, tokens) == pytest.approx(sum(found) / len(found), abs=0.01)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("experts", "each"), [(8, 2), (64, 6), (128, 8)])
def test_an_expert_is_left_out_where_draws_leave_one(experts: int, each: int) -> None:
    """Up to some number of tokens and no further; all of the experts leave none out at once."""
    draw = random.Random(f"{experts} {each}")
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        left = [
            experts - len({one for _ in range(tokens) for one in draw.sample(range(experts), each)})
            for _ in range(1000)
        ]
        mean = sum(left) / len(left)
        if abs(mean - 1) > 0.15:
            assert leaves_an_expert(experts, each, tokens) is (mean > 1), tokens
    assert not leaves_an_expert(experts, experts, 1)


def test_experts_that_some_like_are_fewer() -> None:
    """What is charged is the most: with a few experts that most tokens like, fewer are read."""
    draw = random.Random(0)
    likes = [0.4, 0.3, *[0.3 / 6] * 6]
    found = [len(set(draw.choices(range(8), likes, k=16))) / 8 for _ in range(4000)]
    assert sum(found) / len(found) < asked_share(1 / 8, 16) - 0.05


def request(rows: int) -> TransformersRequest:
    return TransformersRequest(
        model=load_model("mixtral-8x7b"),
        machine=load_machine("xeon8470-cxl-b"),
        prompt=64,
        generated=64,
        model_name="mixtral-8x7b",
        machine_name="xeon8470-cxl-b",
        most_batches=rows,
    )


def test_one_row_on_cpus_reads_two_of_eight_experts() -> None:
    """The step of one row takes as long as its bytes; without experts it would be all of them."""
    asked = request(1)
    plan = plan_transformers(asked)
    job = decoder_job(asked.model, prompt=64, generated=64)
    hardware = hardware_of(asked.machine, needs_gpu=False)
    experts = job.kinds["experts"].bytes
    read = job.read_bytes(job.kinds.keys() - {"embedding"}, 1)
    others = sum(
        each.bytes for kind, each in job.kinds.items() if kind not in ("embedding", "experts")
    )
    assert read == others + experts / 4
    step = next(phase for phase in plan.phases if phase.name.startswith("decode"))
    rates = sum(node.read_bytes_per_s for node in hardware.nodes)
    local = max(node.read_bytes_per_s for node in hardware.nodes)
    seconds = step.seconds
    assert read / rates <= seconds  # all nodes together, at their own rates
    assert seconds < (others + experts) / local / job.engine.products_share


def test_more_rows_read_more_experts_each_fewer() -> None:
    job = decoder_job(load_model("mixtral-8x7b"), prompt=64, generated=64)
    kinds = ("experts",)
    reads = [job.read_bytes(kinds, rows) for rows in (1, 2, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[-1] == pytest.approx(job.kinds["experts"].bytes)
    for rows, read in zip((1, 2, 8, 64), reads, strict=False):
        assert read <= min(rows / 4, 1) * job.kinds["experts"].bytes * (1 + 1e-9)


def test_dense_models_read_all() -> None:
    job = decoder_job(load_model("llama-3-8b"), prompt=64, generated=64)
    assert job.read_bytes(job.kinds, 1) == job.weight_bytes


def test_a_server_with_few_sequences_reads_few_experts() -> None:
    """What the GPU reads: weights but experts nobody asks for and the table that tokens are looked
    up in, and the running sequences' KV.
    """
    asked = VllmRequest(
        model=load_model("mixtral-8x7b"),
        machine=load_machine("spr3-h100"),
        prompt=100,
        generated=100,
        model_name="mixtral-8x7b",
        most_sequences=1,
        gpus=2,
    )
    gpu = replace(asked.machine.gpus[0], memory_bytes=160 << 30)
    plan = plan_vllm(replace(asked, machine=replace(asked.machine, gpus=(gpu,))))
    model = asked.model
    experts = sum(2 * each.elements for each in model.tensors() if each.met < 1)
    unread = experts * 3 / 4 + 2 * model.vocab * model.hidden
    read = (2 * model.parameters - unread) / 2 + 150 * model.kv_bytes_per_token() / 2
    rate = MEMORY_SHARE * (gpu.memory_bandwidth_bytes_per_s or 0)
    expected = read / rate + model.layers * LAYER_S + SEQUENCE_S
    assert plan.phases[0].terms["GPU work"] == pytest.approx(expected, rel=1e-6)
