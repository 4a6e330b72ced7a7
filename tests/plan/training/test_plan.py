"""Training plans: optimal placement, exact bytes, stages and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, parse_plan, plan_text
from cxl_offload.plan.training.job import Stage, TrainingJob, gpu_bytes, host_kinds
from cxl_offload.plan.training.placement import TrainingStep, estimate
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.profile.curves import Estimate
from cxl_offload.profile.operators.model import (
    AdamPoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
)
from cxl_offload.topology import load_machine

from .placed import place

GIB = 1 << 30


def random_step(seed: int) -> tuple[TrainingStep, Hardware]:
    """A step and two nodes that together barely hold it."""
    rng = random.Random(seed)
    params = rng.randint(1, 8) * 10**8
    stages: tuple[Stage, ...] = (1, 2, 3)
    stage = rng.choice(stages)
    accumulation = rng.choice([1, 2, 4])
    kinds = host_kinds(params, stage, accumulation)
    total = sum(kind.bytes for kind in kinds)
    tiers = tuple(
        HostNode(
            name=name,
            tier=name,
            node=at,
            read_bytes_per_s=rng.uniform(1e10, 4e11),
            latency_ns=rng.uniform(80, 500),
            copy_bytes_per_s=rng.uniform(1e10, 6e10),
            usable_bytes=total * rng.uniform(0.2, 0.9) + (64 << 20),
        )
        for at, name in enumerate(("ldram", "cxl"))
    )
    hardware = Hardware(
        machine="random",
        nodes=tiers,
        link_bytes_per_s=rng.uniform(1e10, 6e10),
        local_latency_ns=tiers[0].latency_ns,
        gpu=GpuRates(1e14, 1e12),
        gpu_memory_bytes=1e12,
        gpu_usable_bytes=1e12,
        cores=rng.choice([4, 32]),
    )
    step = TrainingStep(
        kinds=kinds,
        stage=stage,
        forward_s=rng.uniform(0.0, 0.2),
        backward_s=rng.uniform(0.0, 0.2),
        accumulation=accumulation,
        cpu_bytes_per_s=rng.uniform(5e9, 3e11),
        edge=rng.choice([0.0, 0.04, 0.5]),
    )
    return step, hardware


def best_by_hand(step: TrainingStep, hardware: Hardware, grid: int) -> float:
    """The shortest step of all interleave weights of this sum."""
    best = math.inf
    shares = [(at, grid - at) for at in range(grid + 1)]
    for picked in itertools.product(shares, repeat=len(step.kinds)):
        weights = {kind.name: pick for kind, pick in zip(step.kinds, picked, strict=True)}
        room = [
            sum(k.bytes * weights[k.name][at] / grid + (4 << 20) for k in step.kinds)
            for at in range(2)
        ]
        if all(have <= tier.usable_bytes for have, tier in zip(room, hardware.nodes, strict=True)):
            best = min(best, estimate(step, hardware, weights).step_s)
    return best


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", range(5))
def test_placement_is_optimal_on_random_steps(block: int) -> None:
    found_some = 0
    for seed in range(20 * block, 20 * block + 20):
        step, hardware = random_step(seed)

        found = place(step, hardware, grid=2)
        by_hand = best_by_hand(step, hardware, 2)

        assert (found is None) == (by_hand == math.inf), seed
        if found is not None:
            found_some += 1
            assert found[1].step_s == pytest.approx(by_hand, rel=3e-6), seed
    assert found_some >= 5


def request(model: str = "opt-6.7b", **extra: Any) -> TrainingRequest:
    machine = load_machine(extra.pop("machine", "epyc9354-cxl-a"))
    given: dict[str, Any] = {"batch": 16, "tokens": 1024, **extra}
    return TrainingRequest(model=load_model(model), machine=machine, **given)


def granted(plan: Plan) -> dict[int, int]:
    """Bytes on the simulated nodes of the plan's machine when every kind is allocated."""
    session = Session.simulated(load_machine(plan.machine))
    total: dict[int, int] = {}
    held = []
    for kind in dict.fromkeys(home.kind for home in plan.homes):
        policy = next(home.policy for home in plan.homes if home.kind == kind)
        held.append(session.allocate(sum(plan.of(kind).values()), policy))
        for node, nbytes in session.bytes_per_node(held[-1].address, held[-1].nbytes).items():
            total[node] = total.get(node, 0) + nbytes
    return total


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("opt-6.7b", {}),
        ("opt-13b", {}),
        ("opt-13b", {"tiers": ("ldram", "cxl")}),
        ("llama-3-8b", {"limits": {"ldram": 60 * GIB}}),
        ("gpt2-xl", {"limits": {"ldram": 9 * GIB, "rdram": 9 * GIB}}),
    ],
)
def test_planned_bytes_are_those_of_the_pages(model: str, extra: dict[str, Any]) -> None:
    plan = plan_training(request(model, gpu_usable=0.9, **extra))
    assert granted(plan) == {node: nbytes for node, nbytes in plan.node_bytes.items() if nbytes}
    machine = load_machine(plan.machine)
    for node, nbytes in plan.node_bytes.items():
        assert nbytes <= machine.node(node).capacity_bytes
    assert parse_plan(plan_text(plan), file="x") == plan


def test_what_fits_local_memory_stays_there_and_runs() -> None:
    plan = plan_training(request(gpu_usable=0.9))

    assert plan.runs
    assert not plan.cxl.used
    assert plan.node_bytes[0] == sum(plan.node_bytes.values())
    assert plan.command[:3] == ("deepspeed", "--num_gpus=1", "train.py")
    assert set(plan.settings) < set(plan.command)
    config = json.loads(plan.settings["ds_config.json"])
    micro, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert (micro, steps) == (plan.batch.size, plan.batch.count)
    assert micro * steps == 16


def test_several_tiers_run_and_keep_near_what_the_optimizer_streams() -> None:
    plan = plan_training(request("opt-13b", tiers=("ldram", "cxl"), gpu_usable=0.9))

    assert plan.cxl.used
    assert plan.cxl.gain is None
    assert plan.runs
    # the optimizer streams what it can from local memory
    assert plan.of("exp_avg").get("ldram", 0) > plan.of("exp_avg").get("cxl", 0)


def test_stage_three_where_the_gpu_is_too_small_for_parameters() -> None:
    large = plan_training(request("opt-13b", gpu_usable=0.9))
    small = plan_training(request("gpt2", batch=64))

    assert json.loads(large.settings["ds_config.json"])["zero_optimization"]["stage"] == 3
    assert json.loads(small.settings["ds_config.json"])["zero_optimization"]["stage"] == 2
    with pytest.raises(MemoryError, match="one sequence needs"):
        plan_training(request("opt-13b", stage=2))


def zero_stage(plan: Plan) -> int:
    stage = json.loads(plan.settings["ds_config.json"])["zero_optimization"]["stage"]
    assert isinstance(stage, int)
    return stage


def test_stage_one_is_taken_where_gradients_would_be_waited_for_often() -> None:
    """61 is prime: micro-batches are of one sequence, or of all, which need checkpointing."""
    asked = request("opt-1.3b", batch=61, tokens=256, replay=None)
    found = {stage: plan_training(replace(asked, stage=stage)) for stage in (1, 2)}
    best = plan_training(asked)
    assert found[1].tokens_per_s > 1.03 * found[2].tokens_per_s
    assert zero_stage(best) == 1
    assert best.tokens_per_s == pytest.approx(found[1].tokens_per_s)
    assert zero_stage(plan_training(replace(asked, cxl_margin=0.5))) == 2


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_gradients_take_the_copies_that_deepspeed_makes(seed: int, passes: int) -> None:
    """One node, and nothing to hide behind: low-precision copies, and one twice as long.

    The node gives more than both directions of the link together.
    """
    step, hardware = random_step(seed)
    roomy = tuple(replace(node, read_bytes_per_s=1e12) for node in hardware.nodes)
    hardware = replace(hardware, nodes=roomy)
    params = 10**9
    low_s = 2 * params / min(hardware.link_bytes_per_s, hardware.nodes[0].copy_bytes_per_s)
    copies = {1: 2, 2: 2 if passes == 1 else 2 + passes + (passes - 1), 3: 2 + 2 * passes}
    stages: tuple[Stage, ...] = (1, 2, 3)
    for stage in stages:
        kinds = host_kinds(params, stage, passes)
        alone = replace(
            step, kinds=kinds, stage=stage, accumulation=passes, forward_s=0.0, backward_s=0.0
        )
        weights = {kind.name: (1, 0) for kind in kinds}
        found = estimate(alone, hardware, weights)
        # Later passes of stage 3 fetch a sum and parameters over one direction of the link.
        waits = passes - 1 if stage == 3 else 0
        assert found.gradients_exposed_s == pytest.approx((copies[stage] + waits) * low_s)
        fetches = passes if stage == 3 else 0
        assert found.fetch_exposed_s == pytest.approx(fetches * low_s)


def test_stage_two_keeps_the_sum_of_gradients_in_host_memory() -> None:
    """DeepSpeed holds 2 bytes a parameter between passes, beside the 2 that return in."""
    plan = plan_training(request("opt-1.3b", stage=2, gpu_usable=0.9))
    assert plan.batch.count > 1
    params = load_model("opt-1.3b").parameters
    assert sum(plan.of("grad_accumulation").values()) == 2 * params
    once = plan_training(request("opt-1.3b", stage=2, batch=1))
    assert once.of("grad_accumulation") == {}


def test_replay_of_stage_one_agrees_with_its_equations() -> None:
    """The simulator sends gradients in the last pass only; the equations know no trace."""
    plan = plan_training(request("opt-1.3b", batch=61, tokens=256, stage=1))
    assert plan.batch.count == 61
    assert not any("the equations say" in note for note in plan.notes), plan.notes


def test_stage_one_holds_gradients_of_all_parameters_on_the_gpu() -> None:
    job = TrainingJob(model=load_model("opt-1.3b"), batch=4, tokens=256)
    held = {stage: gpu_bytes(job, 2, stage) for stage in (1, 2)}
    assert held[1] - held[2] == 2 * job.model.parameters


def test_stage_two_is_taken_where_stage_one_brings_nothing() -> None:
    """Large micro-batches hide the gradients of each, and stage 1 has less room for them."""
    asked = request("gpt2", batch=64, replay=None)
    other = plan_training(replace(asked, stage=1))
    plan = plan_training(asked)
    assert zero_stage(plan) == 2
    assert other.tokens_per_s < 1.03 * plan.tokens_per_s


def test_node_with_hardly_any_room_does_not_stop_training() -> None:
    plan = plan_training(request("opt-1.3b", limits={"cxl": 1 << 20}))
    assert plan.node_bytes.get(2, 0) == 0


def test_of_equally_fast_micro_batches_the_largest_is_taken() -> None:
    plan = plan_training(request("opt-1.3b", stage=2, gpu_usable=0.9))
    job = TrainingJob(model=load_model("opt-1.3b"), batch=16, tokens=1024)
    needs = {size: gpu_bytes(job, size, 2, checkpointing=False) for size in (1, 2, 4, 8, 16)}
    fits = [size for size, need in needs.items() if need <= 0.9 * 24 * GIB]
    assert plan.batch.size == max(fits) > 1


def test_checkpointing_is_chosen_where_the_batch_does_not_fit_without() -> None:
    roomy = plan_training(request("opt-1.3b", machine="spr3-h100", batch=1, tokens=256))
    tight = plan_training(request("opt-6.7b", stage=2))
    assert any("without activation checkpointing" in note for note in roomy.notes)
    assert any("run` switches it on in models of transformers" in note for note in tight.notes)
    assert (roomy.checkpointing, tight.checkpointing) == (False, True)
    assert "activation_checkpointing" not in roomy.settings["ds_config.json"]
    assert "activation_checkpointing" in tight.settings["ds_config.json"]


def test_optimizer_has_the_published_share_of_a_step() -> None:
    """31 % of a step of 8 billion parameters with batch 3, as printed; other sizes by rule."""
    plan = plan_training(request("llama-3-8b", batch=3, stage=3))
    terms = plan.phases[0].terms
    share = terms["optimizer (CPU)"] / plan.phases[0].seconds
    assert 0.2 < share < 0.42


def test_optimizer_takes_the_rate_that_was_measured() -> None:
    adam = AdamPoint(1000, 28_000, Estimate(28_000 / 50e9, 1e-9, 1.0, 3))
    linear = LinearPoint(1, 8, Estimate(1.0, 1.0, 1.0, 1))
    layer = LayerPoint(1, 8, Estimate(1.0, 1.0, 1.0, 1), Estimate(1.0, 1.0, 1.0, 1))
    operators = OperatorProfile(
        device="cpu", threads=7, linears=(linear,), caches=(), layers=(layer,), adam=adam
    )
    plan = plan_training(request("gpt2-xl", operators=operators))
    given = plan_training(request("gpt2-xl", optimizer_bytes_per_s=50e9))
    assert plan.phases == given.phases
    assert any("50 GB/s, measured with this package's Adam on 7" in each for each in plan.notes)
    assumed = plan_training(request("gpt2-xl"))
    assert any("48% of what local memory gives" in each for each in assumed.notes)
    assert not any(each.startswith("optimizer") for each in given.notes)


def test_larger_micro_batches_send_gradients_less_often() -> None:
    """Where transfers are exposed, the largest micro-batch that fits is taken."""
    slow_link = plan_training(request("gpt2-xl", gpu_usable=1.0, stage=2))
    job = TrainingJob(model=load_model("gpt2-xl"), batch=16, tokens=1024)

    need = gpu_bytes(job, slow_link.batch.size, 2, checkpointing=False)
    assert slow_link.gpu_bytes == need <= 24 * GIB
    assert gpu_bytes(job, 2 * slow_link.batch.size, 2, checkpointing=False) > 24 * GIB


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"tiers": ("ldram", "nvme")}, ConfigError, "tier nvme"),
        ({"optimizer_bytes_per_s": 0.0}, ConfigError, "from 1e-6"),
        ({"model": "opt-66b"}, MemoryError, "do not fit|usable"),
    ],
)
def test_impossible_training_is_refused(
    extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_training(request(**extra))


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        ({"model": "opt-175b", "stage": 3}, "give the host more memory (--add) or a folder on a"),
        ({"model": "gpt2", "gpu_usable": 1e-9}, "plan with more of the GPU (--gpu-usable) or"),
        ({"model": "gpt2", "tokens": 1024, "gpu_usable": 0.03}, "shorten sequences (--seq-len)"),
    ],
)
def test_remedy_is_for_what_lacks_room(extra: dict[str, Any], remedy: str) -> None:
    with pytest.raises(MemoryError) as refused:
        plan_training(request(**extra))
    said = str(refused.value).rpartition("; ")[2]
    assert said.startswith(remedy)
    assert " and " not in said, "the other has room"


def test_remedies_are_for_both_where_both_lack_room() -> None:
    with pytest.raises(MemoryError, match=r"--gpu-usable.* and give the host more memory"):
        plan_training(request("opt-175b", gpu_usable=1e-9))


def test_prices_say_what_another_plan_would_bring() -> None:
    plan = plan_training(request(gpu_usable=0.9))
    prices = {price.what: price.gain_tokens_per_s for price in plan.prices}
    faster = plan_training(request(gpu_usable=0.9, optimizer_bytes_per_s=0.48 * (392e9 + 1e9)))

    assert prices["ldram bandwidth (CPU)"] == pytest.approx(
        faster.tokens_per_s - plan.tokens_per_s, rel=0.01
    )
    assert prices["rdram capacity"] == 0
    assert min(prices.values()) >= 0


def test_command_line_plans_training() -> None:
    arguments = ["plan", "training", "--model", "gpt2-xl", "--machine", "epyc9354-cxl-a"]
    made = CliRunner().invoke(app, [*arguments, "--json"])

    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["executor"] == "deepspeed"


def test_machine_without_read_bandwidths_is_planned_with_what_is_assumed_and_says_so() -> None:
    plan = plan_training(request(machine="spr3-h100"))
    assert any("no read bandwidth of ldram" in note and "assumed" in note for note in plan.notes)


def test_flash_attention_keeps_no_scores() -> None:
    """Scores are 5 bytes a head, a query and a key; without them longer sequences fit."""
    model = load_model("opt-1.3b")
    plain = TrainingJob(model=model, batch=8, tokens=2048)
    flash = replace(plain, flash_attention=True)
    for micro in (1, 4):
        needs = [gpu_bytes(job, micro, 2, checkpointing=False) for job in (plain, flash)]
        assert needs[0] - needs[1] == model.layers * 5 * micro * model.heads * 2048**2


def test_flash_attention_saves_the_checkpoints_and_the_plan_says_what_the_script_does() -> None:
    asked = request("opt-1.3b", tokens=2048)
    plain = plan_training(asked)
    flash = plan_training(replace(asked, flash_attention=True))
    assert flash.tokens_per_s > plain.tokens_per_s
    assert any("with activation checkpointing" in note for note in plain.notes)
    assert any("without activation checkpointing" in note for note in flash.notes)
    assert any("keeps no scores" in note for note in flash.notes)
    assert not any("keeps no scores" in note for note in plain.notes)
