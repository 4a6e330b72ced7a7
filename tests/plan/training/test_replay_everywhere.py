"""Equations and replay of a step agree wherever its states lie, and both are what the bytes take.

The two know nothing of each other. What both are given, the rates of the machine and of the CPUs'
own work, is held against the bytes of the plan over the bandwidth of the node that has them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.plan.model import file as model_file
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.replay_check import simulated_seconds, stated_differences
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.usable import CXL_MARGIN
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.sim import Engines, Trace
from cxl_offload.topology import Machine, machine_names
from cxl_offload.topology import load_machine as read_machine
from cxl_offload.topology.model import TIER_NAMES

GIB = 1 << 30
MODELS = ("gpt2-xl", "opt-6.7b", "llama-3-8b", "mixtral-8x7b")

load_model = functools.cache(model_file.load_model)


@functools.cache
def load_machine(name: str) -> Machine:
    """With a GPU on paper, where plans of training find none."""
    machine = read_machine(name)
    return machine if MachineRates(machine).why_no_gpu() is None else with_gpu(machine, "h100")


def subsets(machine: Machine) -> list[tuple[str, ...]]:
    """All sets of the machine's tiers that have memory of their own."""
    have = [tier.name for tier in machine.tiers if tier.nodes and tier.name in TIER_NAMES]
    nodes = machine.usable_nodes() or machine.usable_nodes(include_gpu_memory=True)
    usable = {node.id for node in nodes}
    have = [name for name in have if usable & set(machine.tier(name).nodes)]
    return [each for size in range(1, len(have) + 1) for each in itertools.combinations(have, size)]


EVERYWHERE = [
    (name, tiers, model)
    for name in machine_names()
    for tiers in subsets(load_machine(name))
    for model in MODELS
]


def request(machine: str, model: str, **extra: Any) -> TrainingRequest:
    given: dict[str, Any] = {"batch": 16, "tokens": 1024, "prices": False, **extra}
    return TrainingRequest(model=load_model(model), machine=load_machine(machine), **given)


def disagreements(machine: str, tiers: tuple[str, ...], model: str) -> list[str] | None:
    """What a plan says of equations and replay; None where there is no room."""
    try:
        plan = plan_training(request(machine, model, tiers=tiers))
    except MemoryError:
        return None
    return [note for note in plan.notes if "replay" in note]


def optimizer_s(plan: Plan) -> float:
    return plan.phases[0].terms["optimizer (CPU)"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("machine", machine_names())
def test_replay_agrees_with_the_equations_everywhere(machine: str) -> None:
    found = {case: disagreements(*case) for case in EVERYWHERE if case[0] == machine}
    assert {case: notes for case, notes in found.items() if notes} == {}
    assert any(notes is not None for notes in found.values())


@pytest.mark.parametrize("rate", [2e9, 20e9, 100e9])
@pytest.mark.parametrize("tiers", [("cxl",), ("rdram",), ("ldram",), ("rdram", "cxl"), None])
def test_replay_agrees_whatever_the_cpus_own_rate_is(
    tiers: tuple[str, ...] | None, rate: float
) -> None:
    """CPUs that are slower than every node, and faster than the slow ones."""
    asked = request("epyc9354-cxl-a", "gpt2-xl", tiers=tiers, optimizer_bytes_per_s=rate)
    notes = plan_training(replace(asked, limits={} if tiers else {"ldram": 12 * GIB})).notes
    assert not list(stated_differences(notes)), notes


def test_a_replay_with_slower_cpus_is_told_apart() -> None:
    """The control: the same request, and CPUs that take twice as long for the same bytes."""

    def slower(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        assert engines.cpu_stream is not None
        half = replace(engines.cpu_stream, bytes_per_s=engines.cpu_stream.bytes_per_s / 2)
        return simulated_seconds(trace, machine, replace(engines, cpu_stream=half))

    asked = request("epyc9354-cxl-a", "gpt2-xl", tiers=("ldram",))
    assert not list(stated_differences(plan_training(asked).notes))
    ((phase, percent),) = stated_differences(plan_training(replace(asked, replay=slower)).notes)
    assert phase == "optimizer"
    assert percent > 50


@pytest.mark.parametrize(
    ("machine", "tier", "bytes_per_s"),
    [
        ("epyc9354-cxl-a", "cxl", 38.4e9),
        ("xeon8470-cxl-b", "cxl", 64.0e9),
        ("spr-1", "cxl", 38.4e9),
    ],
)
def test_states_on_cxl_alone_take_their_bytes_over_what_cxl_gives(
    machine: str, tier: str, bytes_per_s: float
) -> None:
    """28 bytes a parameter for Adam and 6 to convert them; the CPUs could do more than the card."""
    model = load_model("gpt2-xl")
    plan = plan_training(request(machine, "gpt2-xl", tiers=(tier,)))
    assert optimizer_s(plan) == pytest.approx(34 * model.parameters / bytes_per_s, rel=1e-9)


@pytest.mark.parametrize("tiers", [("ldram",), ("rdram",), ("cxl",), ("rdram", "cxl")])
def test_rate_of_the_cpus_is_that_on_local_memory_whatever_tiers_are_allowed(
    tiers: tuple[str, ...],
) -> None:
    said = "optimizer assumed at 188 GB/s, 48% of what local memory gives"
    plan = plan_training(request("epyc9354-cxl-a", "gpt2-xl", tiers=tiers))
    assert any(note.startswith(said) for note in plan.notes), plan.notes


def test_local_rate_that_is_assumed_is_said_where_local_memory_is_left_out() -> None:
    plan = plan_training(request("spr3-h100", "gpt2-xl", tiers=("cxl",)))
    assert any("no read bandwidth of ldram" in note for note in plan.notes), plan.notes


def test_copies_both_ways_share_what_a_card_gives() -> None:
    """Stage 3 on CXL alone: parameters come while gradients leave, low and fp32, in one pass."""
    model = load_model("llama-3-8b")
    plan = plan_training(request("zen4-1", "llama-3-8b", tiers=("cxl",), stage=3))
    assert plan.batch.count == 1
    terms, card = plan.phases[0].terms, 26 * GIB
    moved = (2 + 2 + 2 + 4) * model.parameters  # parameters; the sum out and in; and it in fp32
    late = moved / card - terms["backward (GPU)"]
    assert late > 0
    assert terms["transfers that no work hides"] == pytest.approx(late, rel=1e-6)


def test_no_set_of_fewer_tiers_is_faster() -> None:
    """What is not allowed cannot help; before, plans for slow tiers had slower CPUs besides."""
    seconds = {
        tiers: plan_training(request("epyc9354-cxl-a", "gpt2-xl", tiers=tiers)).phases[0].seconds
        for tiers in subsets(load_machine("epyc9354-cxl-a"))
    }
    for few, many in itertools.permutations(seconds, 2):
        if set(few) < set(many):
            assert seconds[many] <= seconds[few] * (1 + 1e-3 + CXL_MARGIN), (few, many)
