"""Traces made from shapes: bytes by formulas of their own, times worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.sim import Trace, replay
from cxl_offload.sim.training import TrainingWork, training_trace
from cxl_offload.sim.workload import ModelShape, TensorHome

from .machines import GB, machine

SHAPE = ModelShape(
    layers=4, width=256, heads=8, kv_heads=8, head_width=32, inner=1024, vocab=1000
)  # fmt: skip
LAYER_PARAMS = 4 * 256**2 + 2 * 256 * 1024
HEAD_PARAMS = 1000 * 256
DRAM = TensorHome(nodes={0: 1.0})


def moved(
    trace: Trace, *, engine: str, kind: str | None = None
) -> tuple[Counter[int], Counter[int]]:
    """Bytes read from and written to every node."""
    reads: Counter[int] = Counter()
    writes: Counter[int] = Counter()
    for one in trace:
        if one.engine == engine and kind in (None, one.tensor_kind):
            reads.update(one.read_bytes)
            writes.update(one.write_bytes)
    return reads, writes


def test_parameters_of_known_models() -> None:
    """OPT-175B and LLaMA-2-70B: 96 x 1.812e9 and 80 x 0.8556e9 elements in their layers."""
    opt = ModelShape(
        layers=96, width=12288, heads=96, kv_heads=96, head_width=128, inner=49152, vocab=50272
    )
    assert 96 * opt.layer_params + opt.head_params == pytest.approx(174.6e9, rel=2e-3)
    llama = ModelShape(
        layers=80, width=8192, heads=64, kv_heads=8, head_width=128, inner=28672, vocab=32000,
        gated=True,
    )  # fmt: skip
    # Another matrix of the output's size embeds the input, which takes no arithmetic.
    assert 80 * llama.layer_params + 2 * llama.head_params == pytest.approx(68.98e9, rel=1e-3)
    mixtral = ModelShape(
        layers=32, width=4096, heads=32, kv_heads=8, head_width=128, inner=14336, vocab=32000,
        gated=True, experts=8, active_experts=2,
    )  # fmt: skip
    assert 32 * mixtral.layer_params + 2 * mixtral.head_params == pytest.approx(46.7e9, rel=1e-3)
    active = 32 * mixtral.matrix_flops(1) / 2 + 2 * mixtral.head_params
    assert active == pytest.approx(12.88e9, rel=2e-3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=4, max_size=4).filter(any), st.integers(0, 10**12))
def test_places_of_a_tensor_add_up_to_it_and_keep_to_their_shares(
    weights: list[int], nbytes: int
) -> None:
    gpu, dram, cxl, drive = (weight / sum(weights) for weight in weights)
    placed = TensorHome(gpu=gpu, nodes={0: dram, 2: cxl}, drive=drive).place(nbytes)
    parts = [placed.gpu, placed.nodes[0], placed.nodes[2], placed.drive]
    assert sum(parts) == nbytes
    for part, share in zip(parts, (gpu, dram, cxl, drive), strict=True):
        assert abs(part - nbytes * share) <= 1 + nbytes * 1e-9
        assert part == 0 or share > 0
    assert sum(placed.on_host(1).values()) == nbytes - placed.gpu


@pytest.mark.parametrize(
    "fields", [{}, {"gpu": 0.5}, {"gpu": 1.5, "drive": -0.5}, {"nodes": {0: 0.5, 1: 0.6}}]
)
def test_home_that_does_not_add_up_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        TensorHome(**fields)


@pytest.mark.parametrize("fields", [{"layers": 0}, {"kv_heads": 3}, {"active_experts": 2}])
def test_shape_that_makes_no_model_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="model of"):
        dataclasses.replace(SHAPE, **fields)


def training(**changes: Any) -> TrainingWork:
    fields: dict[str, Any] = {
        "shape": SHAPE, "micro_batch": 2, "accumulation": 1, "tokens": 16,
        "gradients": DRAM, "master": DRAM, "momentum": DRAM, "variance": DRAM,
    }  # fmt: skip
    return TrainingWork(**{**fields, **changes})


PARAMS = 4 * LAYER_PARAMS + HEAD_PARAMS


def test_training_step_moves_gradients_out_states_through_the_cpu_and_parameters_back() -> None:
    trace = training_trace(training(momentum=TensorHome(nodes={2: 1.0})))
    _, out = moved(trace, engine="d2h", kind="gradients")
    assert out == {0: 4 * PARAMS}  # converted to fp32 on the GPU
    assert moved(trace, engine="h2d", kind="gradients") == ({}, {})
    back, _ = moved(trace, engine="h2d", kind="weights")
    assert back == {0: 2 * PARAMS}
    reads, writes = moved(trace, engine="cpu", kind="optimizer")
    assert reads == {0: 12 * PARAMS, 2: 4 * PARAMS}
    assert writes == {0: (8 + 2) * PARAMS, 2: 4 * PARAMS}
    assert {one.phase for one in trace} == {"forward", "backward", "optimizer"}
    tokens = 32
    pairs = 2 * 16 * 17 / 2
    forward = 2 * PARAMS * tokens + 4 * 4 * pairs * 256
    head = 2 * HEAD_PARAMS * tokens  # a checkpoint stands before it: it is computed once
    assert sum(one.flops for one in trace) == pytest.approx(4 * forward - head)


def test_training_step_computes_the_scores_that_its_work_names() -> None:
    """Attention: two products of matrices forward, four backward, five where scores are computed
    again; with checkpoints the two of the forward once more."""
    tokens, matrices = 32, 2 * 32 * (4 * LAYER_PARAMS + HEAD_PARAMS)
    layers = matrices - 2 * tokens * HEAD_PARAMS
    product = 4 * 2 * tokens * 9.5 * 256  # layers, operations, queries, attended, width of heads
    for checkpointing in (False, True):
        for again in (False, True):
            work = training(checkpointing=checkpointing, attended=9.5, recomputed_scores=again)
            flops = sum(one.flops for one in training_trace(work))
            products = 2 + (5 if again else 4) + (2 if checkpointing else 0)
            expected = 3 * matrices + (layers if checkpointing else 0) + products * product
            assert flops == pytest.approx(expected)


@pytest.mark.parametrize("passes", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("zero_stage", "low_out", "low_back"),
    [
        (1, lambda passes: 0, lambda passes: 0),  # the sum stays on the GPU
        (2, lambda passes: passes if passes > 1 else 0, lambda passes: passes - 1),
        (3, lambda passes: passes, lambda passes: passes),
    ],
)
def test_gradients_are_added_on_the_gpu_as_deepspeed_does(
    passes: int,
    zero_stage: int,
    low_out: Callable[[int], int],
    low_back: Callable[[int], int],
) -> None:
    """Sums are on the stage, fp32 gradients at home; formulas as counted in DeepSpeed's source."""
    home = TensorHome(nodes={2: 1.0})
    work = training(accumulation=passes, zero_stage=zero_stage, gradients=home, stage=1)
    trace = training_trace(work)
    _, out = moved(trace, engine="d2h", kind="gradients")
    back, _ = moved(trace, engine="h2d", kind="gradients")
    assert out == {2: 4 * PARAMS} | ({1: 2 * PARAMS * n} if (n := low_out(passes)) else {})
    assert back == ({1: 2 * PARAMS * n} if (n := low_back(passes)) else {})
    assert moved(trace, engine="cpu", kind="gradients") == ({}, {})


def test_zero_has_three_stages() -> None:
    with pytest.raises(ConfigError, match="ZeRO stage 4: 1, 2 or 3"):
        training(zero_stage=4)


def test_parameters_on_the_host_are_loaded_for_forward_and_backward() -> None:
    trace = training_trace(training(parameters=TensorHome(nodes={2: 1.0})))
    loaded, _ = moved(trace, engine="h2d", kind="weights")
    # The output's are still there when backward begins.
    assert loaded == {2: 2 * (2 * PARAMS) - 2 * HEAD_PARAMS}
    _, writes = moved(trace, engine="cpu", kind="optimizer")
    assert writes == {0: 12 * PARAMS, 2: 2 * PARAMS}


def test_states_on_the_drive_are_loaded_and_stored_again() -> None:
    drive = TensorHome(drive=1.0)
    trace = training_trace(training(master=drive, momentum=drive, variance=drive, stage=1))
    stored, loaded = moved(trace, engine="nvme")
    assert loaded == {1: 12 * PARAMS}
    assert stored == {1: 12 * PARAMS}


def test_states_in_gpu_memory_are_updated_there() -> None:
    gpu = TensorHome(gpu=1.0)
    trace = training_trace(training(gradients=gpu, master=gpu, momentum=gpu, variance=gpu))
    assert {one.engine for one in trace} == {"gpu"}
    update = sum(one.accelerator_bytes for one in trace if one.phase == "optimizer")
    assert update == (4 + 3 * 8) * PARAMS


BIG = ModelShape(
    layers=8, width=4096, heads=32, kv_heads=32, head_width=128, inner=16384, vocab=32000
)


def test_gradients_leave_behind_backward_and_states_on_cxl_lengthen_the_optimizer() -> None:
    cxl = TensorHome(nodes={2: 1.0})
    work = training(shape=BIG, micro_batch=8, tokens=1024)
    near = replay(training_trace(work), machine())
    far_states = dataclasses.replace(work, master=cxl, momentum=cxl, variance=cxl)
    far = replay(training_trace(far_states), machine())
    apart = replay(training_trace(dataclasses.replace(work, overlap=False)), machine())
    assert near.phase_seconds["forward"] == pytest.approx(far.phase_seconds["forward"])
    params = 8 * BIG.layer_params + BIG.head_params
    # Computing takes longer than the link; only the last layer's gradients come after it.
    alone = 4 * 2 * params * 8 * 1024 * 0.75 / 1e12
    assert near.phase_seconds["backward"] == pytest.approx(alone, rel=0.06)
    gradients = 4 * params / (10 * GB)
    assert apart.phase_seconds["backward"] - near.phase_seconds["backward"] > 0.8 * gradients
    # Bytes a parameter: 16 read at 100 GB/s and 14 written at 50, or 24 both ways at 20 GB/s.
    on_dram, on_cxl = 16 * params / (100 * GB) + 14 * params / (50 * GB), 24 * params / (20 * GB)
    assert near.phase_seconds["optimizer"] == pytest.approx(on_dram, rel=0.05)
    assert far.phase_seconds["optimizer"] == pytest.approx(on_cxl, rel=0.05)


@pytest.mark.parametrize("fields", [{"micro_batch": 0}, {"accumulation": 0}, {"tokens": 0}])
def test_training_of_nothing_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        training(**fields)
