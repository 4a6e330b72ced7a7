"""Checkpoints of activations on the host: what they take, when they are, and what the run moves."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.plan.equations.activation_bytes import (
    ACTIVATIONS,
    COPIES_AHEAD,
    LEAVING_BYTES,
    held_on_gpu,
)
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, parse_plan, plan_text
from cxl_offload.plan.training.job import (
    HostKind,
    Stage,
    TrainingJob,
    gpu_bytes,
    host_kinds,
)
from cxl_offload.plan.training.placement import TrainingStep, estimate, least_step_s
from cxl_offload.plan.training.plan import DeepSpeed, TrainingRequest, plan_training
from cxl_offload.plan.training.ranks import Ranks
from cxl_offload.plan.training.search import StepSearch
from cxl_offload.plan.training.trace import planned_work
from cxl_offload.sim import training_trace
from cxl_offload.topology import load_machine

from .placed import place
from .test_plan import best_by_hand, random_step

MACHINE = "epyc9354-cxl-a"
PARAMS = 10**9
LINK = 1e10


def request(**extra: Any) -> TrainingRequest:
    """Four hosts with a slow network between them: every pass that is saved counts."""
    given: dict[str, Any] = {
        "model": load_model("opt-6.7b"),
        "machine": load_machine(MACHINE),
        "batch": 64,
        "tokens": 2048,
        "flash_attention": True,
        "ranks": Ranks(hosts=4, network_bytes_per_s=1e9),
        "offload_checkpoints": True,
        "prices": False,
    }
    return TrainingRequest(**given | extra)


def offloaded(plan: Plan) -> int:
    return sum(plan.of(ACTIVATIONS).values())


def one_node(stage: Stage, passes: int, kept_s: float = 3.0) -> tuple[TrainingStep, Hardware]:
    """A step whose copies all take the link's rate, with checkpoints that take 3 s each way."""
    node = HostNode(
        name="ldram", tier="ldram", node=0, read_bytes_per_s=1e12, latency_ns=100.0,
        copy_bytes_per_s=1e12, usable_bytes=1e12,
    )  # fmt: skip
    hardware = Hardware(
        machine="one", nodes=(node,), link_bytes_per_s=LINK, local_latency_ns=100.0,
        gpu=GpuRates(1e14, 1e12), gpu_memory_bytes=1e12, gpu_usable_bytes=1e12, cores=8,
    )  # fmt: skip
    kinds = host_kinds(PARAMS, stage, passes)
    if kept_s:
        kinds = (*kinds, HostKind(ACTIVATIONS, int(kept_s * LINK), 0.0, copied=True))
    step = TrainingStep(
        kinds=kinds, stage=stage, forward_s=1.0, backward_s=2.0, accumulation=passes,
        cpu_bytes_per_s=1e12,
    )  # fmt: skip
    return step, hardware


@pytest.mark.parametrize(
    ("stage", "passes", "forward", "backward"),
    [
        # 3 s there beside 1 s of forward; 3 s back beside 2 s of backward, in which 0.4 s of
        # gradients leave in the other direction.
        (2, 1, 2.0, 1.0),
        (1, 1, 2.0, 1.0),
        # Stage 1 sends gradients in the last of three passes only: checkpoints cross in all.
        (1, 3, 6.0, 3.0),
        # Parameters of stage 3 (0.2 s) come beside the backward too, and low-precision gradients
        # out and in again (0.2 s) after them.
        (3, 1, 2.0, 3.0 + 0.2 + 0.2 - 2.0),
        # The first of two passes sends 0.2 s of gradients; the second fetches as many first and
        # sends them in both precisions: 0.2 + 0.2 + 0.4 s after the 3 s of checkpoints.
        (2, 2, 4.0, 1.0 + 1.8),
    ],
)
def test_what_checkpoints_expose_is_what_is_worked_out_by_hand(
    stage: Stage, passes: int, forward: float, backward: float
) -> None:
    step, hardware = one_node(stage, passes)
    found = estimate(step, hardware, {kind.name: (1,) for kind in step.kinds})
    assert found.fetch_exposed_s == pytest.approx(forward)
    assert found.gradients_exposed_s == pytest.approx(backward)
    hidden, _ = one_node(stage, passes, 0.9)
    without, _ = one_node(stage, passes, 0.0)
    weights = {kind.name: (1,) for kind in hidden.kinds}
    if stage != 3 and passes == 1:
        assert estimate(hidden, hardware, weights).step_s == pytest.approx(
            estimate(without, hardware, weights).step_s
        )


def test_placement_is_optimal_with_checkpoints() -> None:
    placed_some = 0
    for seed in range(100, 112):
        step, hardware = random_step(seed)
        kept = HostKind(ACTIVATIONS, step.low_bytes * (1 + seed % 3), 0.0, copied=True)
        fewer = [kind for kind in step.kinds if kind.name != "exp_avg_sq"]
        step = replace(step, kinds=(*fewer, kept))
        found = place(step, hardware, grid=2)
        by_hand = best_by_hand(step, hardware, 2)
        assert (found is None) == (by_hand == float("inf")), seed
        if found is not None:
            placed_some += 1
            assert found[1].step_s == pytest.approx(by_hand, rel=3e-6), seed
            assert least_step_s(step, hardware) <= found[1].step_s * (1 + 1e-9)
    assert placed_some >= 4


def test_the_gpu_holds_what_is_on_its_way() -> None:
    assert held_on_gpu(1000, 10) == 1000
    many = 100 * LEAVING_BYTES
    assert held_on_gpu(many, 100) == LEAVING_BYTES * (2 + COPIES_AHEAD)
    job = TrainingJob(model=load_model("opt-6.7b"), batch=16, tokens=2048, flash_attention=True)
    checkpoints = job.checkpoint_bytes(16)
    assert checkpoints == 2 * 16 * 2048 * 4096 * 32
    less = gpu_bytes(job, 16, 3) - gpu_bytes(job, 16, 3, offloaded=True)
    assert less == checkpoints - (LEAVING_BYTES + 3 * checkpoints // 32)


def test_checkpoints_that_are_too_small_stay_on_the_gpu() -> None:
    """262,144 bytes are the least that a tensor of activations has to have."""
    assert held_on_gpu(2000 * 262_143, 2000) == 2000 * 262_143
    assert held_on_gpu(2000 * 262_144, 2000) == 268_435_456 + 3 * 262_144


def test_small_checkpoints_are_planned_as_what_stays() -> None:
    """4000 layers of 64 numbers: one sequence keeps more on the GPU than two, whose leave."""
    small = replace(
        load_model("opt-125m"), layers=4000, hidden=64, heads=1, kv_heads=1, head_dim=64, ffn=256,
        vocab=512, embed_dim=64,
    )  # fmt: skip
    asked = request(model=small, tokens=1024, batch=2, stage=2, ranks=Ranks())
    job = TrainingJob(model=small, batch=2, tokens=1024, flash_attention=True)
    rest = 2 * small.parameters + 2 * 2 * 200_000_000  # two buckets of gradients, which are more
    assert small.parameters > 200_000_000
    # Checkpoints of 131,072 and 262,144 bytes; 512 logits take 8 bytes each, 64 numbers 34.
    stay = rest + 4000 * 131_072 + 8 * 1024 * 512
    leave = rest + 268_435_456 + 3 * 262_144 + 8 * 2048 * 512
    assert leave < stay
    for room, planned in {
        stay: [(1, 0, stay), (2, 4000 * 262_144, leave)],
        stay - 1: [(2, 4000 * 262_144, leave)],
        leave - 1: [],
    }.items():
        hardware = replace(asked.hardware(), gpu_usable_bytes=room)
        found = [
            (each.micro, each.step.activation_bytes, each.gpu_bytes)
            for each in StepSearch(asked, job, "").steps(hardware)
        ]
        assert found == planned


def test_larger_micro_batches_are_planned_where_they_bring_the_margin() -> None:
    """The control is a margin above the gain, and a request that does not ask."""
    asked = request()
    unasked = plan_training(replace(asked, offload_checkpoints=False))
    plan = plan_training(asked)
    gain = unasked.phases[0].seconds / plan.phases[0].seconds - 1
    assert 0.1 < gain < 0.8
    assert plan.batch.size == 2 * unasked.batch.size
    assert offloaded(plan) == TrainingJob(
        model=asked.model, batch=16, tokens=2048
    ).checkpoint_bytes(plan.batch.size)
    assert plan.checkpointing
    assert any("on the host between forward and backward" in note for note in plan.notes)
    assert plan_text(plan_training(replace(asked, cxl_margin=0.9))) == plan_text(
        plan_training(replace(asked, cxl_margin=0.9, offload_checkpoints=False))
    )
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan
    why = plan_training(replace(asked, why=True)).why
    assert any("with checkpoints on the GPU" in line and "slower" in line for line in why)


def test_a_sequence_fits_only_with_its_checkpoints_on_the_host() -> None:
    machine = load_machine(MACHINE)
    assert machine.gpus[0].memory_bytes
    job = TrainingJob(model=load_model("opt-6.7b"), batch=1, tokens=2048, flash_attention=True)
    need = gpu_bytes(job, 1, 3, offloaded=True)
    asked = request(
        batch=4, stage=3, gpu_usable=1.001 * need / machine.gpus[0].memory_bytes, cxl_margin=0.99
    )
    assert need * 1.001 < gpu_bytes(job, 1, 3)
    plan = plan_training(asked)
    assert offloaded(plan) == job.checkpoint_bytes(1)
    with pytest.raises(MemoryError, match="one sequence needs"):
        plan_training(replace(asked, offload_checkpoints=False))


def test_host_memory_has_to_hold_the_checkpoints() -> None:
    asked = request(tiers=("ldram",))
    rest = sum(plan_training(replace(asked, offload_checkpoints=False)).node_bytes.values())
    tight = replace(asked, limits={"ldram": int(1.1 * rest)})
    assert offloaded(plan_training(asked)) > 0.2 * rest
    assert not offloaded(plan_training(tight))


def test_the_replay_moves_checkpoints_both_ways_in_every_pass() -> None:
    asked = request(ranks=Ranks(), cxl_margin=0.0, model=load_model("llama-3-8b"), batch=16)
    plan = plan_training(asked)
    assert offloaded(plan)
    assert not any("the equations say" in note for note in plan.notes), plan.notes
    executor = DeepSpeed(asked)
    found = executor.search(executor.hardware())
    assert found is not None
    step = found.choice.step
    work = planned_work(executor._job, step, found.hardware, found.choice.weights)
    moved = []
    for each in (work, replace(work, checkpoints=None)):
        events = list(training_trace(replace(each, accumulation=2)))
        for engine, phase in itertools.product(("d2h", "h2d"), ("forward", "backward")):
            moved.append(
                sum(e.accelerator_bytes for e in events if (e.engine, e.phase) == (engine, phase))
            )
    there = [with_ - without for with_, without in zip(moved[:4], moved[4:], strict=True)]
    assert there == [2 * step.activation_bytes, 0, 0, 2 * step.activation_bytes]


def test_the_command_line_takes_the_option() -> None:
    words = ["plan", "training", "--model", "opt-6.7b", "--machine", MACHINE, "--batch", "64"]
    words += ["--seq-len", "2048", "--flash-attention", "--hosts", "4", "--network", "1GB/s"]
    kinds = []
    for more in ([], ["--offload-checkpoints"]):
        done = CliRunner().invoke(app, [*words, *more, "--json"])
        assert done.exit_code == 0, done.output
        kinds.append({home["kind"] for home in json.loads(done.stdout)["homes"]})
    assert kinds[1] - kinds[0] == {ACTIVATIONS}
