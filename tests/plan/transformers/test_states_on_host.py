"""Hidden states of all rows on the host beside a GPU: room, bytes, time, and the choice."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.memory.policy import parse_policy
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.phases import phases_of_block
from cxl_offload.plan.decoding.trace import cpu_engines, planned_trace
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.executor import Candidate
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.planned_machine import at_decoding_rates
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.transformers.layout import Layout, layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, plan_transformers
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.plan.transformers.queues import compared as compared_seconds
from cxl_offload.plan.transformers.search import BestHomes, Wish
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.topology import load_machine

from .requests import request

GIB = 1 << 30
PROMPT = 512


def best(home: str | None, *given: str, **asked: Any) -> Candidate[BestHomes] | None:
    """The best plan with hidden states there; None: wherever is best."""
    executor = Transformers(request(*given, **asked))
    return best_of(executor, home)


def best_of(
    executor: Transformers, home: str | None, hardware: Hardware | None = None
) -> Candidate[BestHomes] | None:
    wish = Wish() if home is None else Wish(homes={STATES: home})
    return executor._best(hardware or executor.hardware(), wish=wish)


def on_host(*given: str, **asked: Any) -> tuple[Transformers, Candidate[BestHomes]]:
    executor = Transformers(request(*given, **asked))
    found = best_of(executor, "host")
    assert found is not None
    return executor, found


# Room --------------------------------------------------------------------------------------------


def test_hidden_states_on_the_gpu_count_in_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control has none of them there."""
    executor = Transformers(request("mixtral-8x7b"))
    hardware, job = executor.hardware(), executor.job
    found = best_of(executor, "gpu")
    assert found is not None
    homes, rows = found.choice.homes, found.sequences
    assert homes.batches > 1
    held = 4 * 2 * rows * PROMPT * 4096
    assert held > 8 * GIB
    assert homes.layout.gpu_bytes(job) + held <= found.gpu_bytes <= hardware.gpu_usable_bytes
    monkeypatch.setattr(Layout, "held_bytes", lambda layout, job, rows: rows)
    without = best_of(executor, "gpu")
    assert without is not None
    assert without.sequences > 2 * found.sequences


@pytest.mark.parametrize(
    ("model", "tensors", "width"), [("mixtral-8x7b", 3, 4096), ("opt-30b", 4, 7168)]
)
def test_host_has_the_states_of_all_rows_and_the_gpu_those_of_four_batches(
    model: str, tensors: int, width: int
) -> None:
    """By hand: of a layer what it reads and makes, and one for every table of embeddings."""
    executor, found = on_host(model)
    homes, job = found.choice.homes, executor.job
    one = 2 * PROMPT * width
    assert sum(homes.kinds[STATES]) == tensors * found.sequences * one
    assert homes.layout.buffer_bytes(job) == 4 * homes.rows * one
    there = replace(homes.layout, states="gpu")
    ids = 3 * 8 * found.sequences * (PROMPT + 32)
    assert homes.layout.gpu_bytes(job) == there.gpu_bytes(job) + 4 * homes.rows * one
    assert homes.layout.held_bytes(job, found.sequences) == ids
    for have, node in zip(found.host, found.hardware.nodes, strict=True):
        assert have <= node.usable_bytes
    assert found.gpu_bytes <= found.hardware.gpu_usable_bytes


@pytest.mark.parametrize("kv", ["gpu", "both", "host"])
def test_no_block_has_more_batches_than_there_is_room_for(kv: str) -> None:
    """One more than the most has no program, whatever is left out of the count of the most."""
    executor = Transformers(request("mistral-7b", limits={"ldram": 24 * GIB}, tiers=("ldram",)))
    job, hardware = executor.job, executor.hardware()
    compared = 0
    for layout in layouts(job, hardware, batches=(4, 32, 128)):
        moved = replace(layout, states="host")
        most = most_batches(job, hardware, moved)
        if layout.kv != kv or not layout.streamed or most < 1:
            continue
        count = max(2, most + 1)
        program = SharesProgram(job, hardware, moved, batches=(count, count), unit_s=10.0)
        assert program.solve() is None, moved
        compared += 1
    assert compared > 3


def test_one_batch_keeps_its_states_on_the_gpu() -> None:
    """As the integration does, which copies parts of a batch only."""
    _, found = on_host("llama-65b")
    assert found.choice.homes.batches >= 2
    assert best("host", "llama-65b", most_batches=1) is None
    assert best(None, "llama-65b", most_batches=1) is not None


def test_cpus_alone_have_no_states_beside_a_gpu() -> None:
    machine = with_gpu(load_machine("epyc9354-cxl-a"), "none")
    executor = Transformers(replace(request("opt-6.7b"), machine=machine))
    assert best_of(executor, "host") is None
    assert best_of(executor, None) is not None


# Time --------------------------------------------------------------------------------------------


def test_states_cross_the_link_both_ways_in_the_prefill_and_at_every_token() -> None:
    """By hand, beside the same block with its states on the GPU.

    In: every layer and the final norm, and the last token for the head; out: the same without it.
    """
    executor, found = on_host("llama-65b", tiers=("ldram",))
    job, hardware = executor.job, found.hardware
    block = executor.block(found)
    there = replace(block, states=None, activations_gpu=1.0)
    moved = phases_of_block(job, hardware, block)
    kept = phases_of_block(job, hardware, there)
    one = 2 * block.sequences * 8192
    (node,) = hardware.nodes
    copied = min(hardware.link_bytes_per_s, node.copy_bytes_per_s)
    decode, prefill = moved.decode_terms, moved.prefill_terms
    assert decode["hidden loads"] == pytest.approx(82 * one / copied)
    outs = 81 + (found.choice.homes.layout.home_of("embedding") == "gpu")
    assert decode["hidden stores"] == pytest.approx(outs * one / copied)
    link = kept.prefill_terms["weights over the link"]
    assert prefill["weights and hidden states over the link"] == pytest.approx(
        link + (81 * PROMPT + 1) * one / copied
    )
    stores = kept.prefill_terms["KV stores"]
    assert prefill["KV and hidden stores"] == pytest.approx(stores + outs * PROMPT * one / copied)
    calls = block.batches * 80 * job.engine.states_calls * job.engine.call_s
    for name, seconds in kept.decode_terms.items():
        if name.startswith("GPU work"):
            assert decode[name] == pytest.approx(seconds + calls)
    assert moved.total_s > kept.total_s


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_memory_of_a_node_is_charged_for_both_ways(phase: str) -> None:
    executor, found = on_host("llama-65b", tiers=("ldram",))
    job, hardware, block = executor.job, found.hardware, executor.block(found)
    (node,) = hardware.nodes
    phases = phases_of_block(job, hardware, block)
    terms = phases.prefill_terms if phase == "prefill" else phases.decode_terms
    tokens = PROMPT if phase == "prefill" else 1
    kv = job.kv_bytes_per_token * (PROMPT if phase == "prefill" else job.mean_kv_tokens)
    one = 2 * block.sequences * 8192
    outs = 81 + (found.choice.homes.layout.home_of("embedding") == "gpu")
    nbytes = sum(block.weights_host) + block.sequences * kv * (1 - block.kv_gpu)
    nbytes += (81 * tokens + 1) * one + outs * tokens * one
    rate = max(node.read_bytes_per_s, node.copy_bytes_per_s)
    assert terms["memory of the busiest node"] == pytest.approx(nbytes / rate)


def test_states_bring_little_where_their_way_takes_what_they_bring() -> None:
    """Of one token after long prompts the prefill is most, and by half the link it waits."""
    executor = Transformers(request("mixtral-8x7b", prompt=1984, generated=2))
    hardware, gains, bound = executor.hardware(), [], []
    for rate in (1e9, 5e8):
        nodes = tuple(replace(node, copy_bytes_per_s=rate) for node in hardware.nodes)
        slow = replace(hardware, nodes=nodes, link_bytes_per_s=rate)
        moved, kept = (best_of(executor, home, slow) for home in ("host", "gpu"))
        assert moved is not None
        assert kept is not None
        gains.append(moved.tokens_per_s / kept.tokens_per_s - 1)
        terms = moved.choice.phases.prefill_terms
        bound.append(max(terms, key=terms.__getitem__))
    assert gains[0] > 0.3
    assert gains[1] < 0.01
    assert bound == ["GPU work", "KV and hidden stores"]


def replay_over_equations(
    executor: Transformers, found: Candidate[BestHomes], block: Block
) -> dict[str, float]:
    """By how much the replay of a block is longer, by phase."""
    job, hardware = executor.job, found.hardware
    machine = at_decoding_rates(executor.machine(found))
    phases = phases_of_block(job, hardware, block)
    engines = cpu_engines(machine, job.engine)
    replayed = simulated_seconds(planned_trace(job, hardware, block), machine, engines)
    seconds = {"prefill": phases.prefill_s, "decode": phases.decode_token_s}
    return {phase: replayed[phase] / each - 1 for phase, each in seconds.items()}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("machine", ["epyc9354-cxl-a", "gh200", "dgx-h100", "xeon-t4"])
@pytest.mark.parametrize("model", ["opt-30b", "opt-66b", "llama-3-8b", "llama-65b", "mixtral-8x7b"])
def test_replay_agrees_with_the_equations_as_without_the_states(machine: str, model: str) -> None:
    """What makes it longer (copies that attention and the GPU share memory with) is as much of a
    block whose states have no bytes."""
    executor, found = on_host(model, machine)
    block = executor.block(found)
    assert block.states is not None
    none = replace(block.states, token_in=0.0, token_out=0.0, pass_in=0.0)
    moved = replay_over_equations(executor, found, block)
    kept = replay_over_equations(executor, found, replace(block, states=none))
    for phase, difference in moved.items():
        assert -0.01 < difference < 0.3
        assert difference == pytest.approx(kept[phase], abs=0.03)


def test_replay_without_the_states_is_found_out() -> None:
    """The control, where their way is the longest: a prefill by a slow link."""
    executor, found = on_host("mixtral-8x7b", prompt=1984, generated=64)
    hardware, block, job = found.hardware, executor.block(found), executor.job
    nodes = tuple(replace(node, copy_bytes_per_s=2e8) for node in hardware.nodes)
    slow = replace(found, hardware=replace(hardware, nodes=nodes, link_bytes_per_s=2e8))
    there = executor.machine(found)
    (gpu,) = there.gpus
    assert gpu.link is not None
    link = replace(gpu.link, h2d_bandwidth_bytes_per_s=2e8, d2h_bandwidth_bytes_per_s=2e8)
    machine = at_decoding_rates(replace(there, gpus=(replace(gpu, link=link),)))
    seconds = phases_of_block(job, slow.hardware, block).prefill_s
    engines = cpu_engines(machine, job.engine)
    for states, least in ((block.states, 0.99), (None, 0.0)):
        trace = planned_trace(job, slow.hardware, replace(block, states=states))
        replayed = simulated_seconds(trace, machine, engines)["prefill"]
        assert least * seconds < replayed < (1.01 if least else 0.5) * seconds


# Choice ------------------------------------------------------------------------------------------


CASES = list(
    itertools.product(
        ("epyc9354-cxl-a", "xeon-t4", "gh200", "dgx-h100", "desktop-4090", "aws-a10g", "spr3-h100"),
        ("opt-6.7b", "opt-30b", "llama-65b", "llama-3-70b", "mixtral-8x7b", "mistral-7b"),
        ((64, 128), (512, 32), (1984, 64)),
    )
)


def compared(found: Candidate[BestHomes]) -> float:
    """With the margins of what no GPU has measured."""
    layout = found.choice.homes.layout
    return compared_seconds(layout, 1 / found.tokens_per_s)


@pytest.mark.slow(reason="plans many requests twice")
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_choice_is_never_slower_than_without_it(first: int) -> None:
    """And it is taken where it brings a thousandth, and nowhere else."""
    homes = {"gpu": 0, "host": 0}
    drawn = random.Random(3).sample(CASES, 40)
    for machine, model, (prompt, generated) in drawn[first : first + 10]:
        executor = Transformers(request(model, machine, prompt=prompt, generated=generated))
        chosen, kept, moved = (best_of(executor, home) for home in (None, "gpu", "host"))
        if chosen is None or kept is None:
            assert chosen is moved is None
            continue
        home, case = chosen.choice.homes.layout.states, (machine, model, prompt)
        homes[home] += 1
        if home == "gpu":
            assert chosen.tokens_per_s == kept.tokens_per_s, case
            assert moved is None or compared(moved) > compared(kept) * (1 - 2e-3), case
        else:
            assert chosen.tokens_per_s > 1.00099 * kept.tokens_per_s, case
    assert min(homes.values()) > 0, homes


def test_states_stay_on_the_gpu_where_it_makes_no_difference() -> None:
    """All weights are there: more batches read as many bytes for each."""
    executor = Transformers(request("llama-3-8b", "gh200"))
    chosen, moved = best_of(executor, None), best_of(executor, "host")
    assert chosen is not None
    assert chosen.choice.homes.layout.states == "gpu"
    assert not chosen.choice.homes.layout.streamed
    assert moved is None or moved.tokens_per_s <= chosen.tokens_per_s


@pytest.mark.parametrize("what", ["usable_bytes", "copy_bytes_per_s", "read_bytes_per_s"])
def test_more_of_a_node_is_not_slower(what: str) -> None:
    executor = Transformers(request("mixtral-8x7b", prompt=1984, generated=64))
    hardware = executor.hardware()
    rates = []
    for factor in (0.6, 0.8, 1.0, 1.25, 1.5):
        nodes = [replace(n, **{what: getattr(n, what) * factor}) for n in hardware.nodes]
        found = best_of(executor, None, replace(hardware, nodes=tuple(nodes)))
        assert found is not None
        assert found.choice.homes.layout.states == "host"
        rates.append(found.tokens_per_s)
    for less, more in itertools.pairwise(rates):
        assert more >= less * (1 - 1e-3), rates


# What is written ---------------------------------------------------------------------------------


def test_plan_and_its_report_say_where_the_states_lie() -> None:
    plan = plan_transformers(replace(request("mixtral-8x7b"), why=True))
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan
    parse_policy(plan.policies[STATES], load_machine("epyc9354-cxl-a"))
    homes = plan.of(STATES)
    rows = plan.batch.size * plan.batch.count
    assert homes["gpu"] == 4 * 2 * plan.batch.size * PROMPT * 4096
    assert sum(n for at, n in homes.items() if at != "gpu") == 3 * 2 * rows * PROMPT * 4096
    assert [note for note in plan.notes if f"hidden states of all {rows} sequences lie" in note]
    (reason,) = (each for each in plan.why if "activations on the GPU instead" in each)
    assert "slower" in reason


def test_plan_with_the_states_on_the_gpu_has_no_policy_of_them() -> None:
    plan = plan_transformers(replace(request("opt-6.7b", "gh200"), why=True))
    assert STATES not in plan.policies
    assert set(plan.of(STATES)) == {"gpu"}
    assert [each for each in plan.why if "activations on the host instead" in each]


def test_weights_that_are_charged_for_more_than_their_bytes_leave_nothing_negative() -> None:
    """Stripes have their shares only nearly: hidden states took -0.5 ms, an error."""
    machine = load_machine("spr3-h100")
    sizes = (47697078348, 28939043220, 53825167067)
    nodes = zip(machine.nodes, sizes, strict=True)
    faster = replace(
        machine,
        nodes=tuple(replace(node, capacity_bytes=size) for node, size in nodes),
        gpus=tuple(
            replace(gpu, memory_bandwidth_bytes_per_s=5 * gpu.memory_bandwidth_bytes_per_s)
            for gpu in machine.gpus
        ),
    )
    asked = replace(request("llama-3-70b", prompt=32, generated=128), machine=faster)
    plan = plan_transformers(asked)
    assert plan.tokens_per_s > 0
    assert all(seconds >= 0 for phase in plan.phases for seconds in phase.terms.values())
