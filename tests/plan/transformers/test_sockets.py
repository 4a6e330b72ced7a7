"""Plans for the cores of two sockets: weights interleaved, on one node, or copied near each."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.memory.policy import Replicate, parse_policy
from cxl_offload.plan.decoding.phases import phases_of_block
from cxl_offload.plan.decoding.trace import planned_trace
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.replay_check import simulated_seconds
from cxl_offload.plan.socket_rates import sockets_with_cores
from cxl_offload.plan.transformers.bound import least_seconds
from cxl_offload.plan.transformers.homes import block_of, homes_of
from cxl_offload.plan.transformers.layout import COPIED_ROWS, Layout, layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest, plan_transformers
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.plan.transformers.shares import IDLE, KV, ON_CPU, Shares
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.sim import Trace
from cxl_offload.topology import load_machine, machine_names

MACHINES = ("xeon8470-cxl-b", "spr-2", "emr-2", "xeon6430", "zen4-1")
MODELS = ("llama-65b", "opt-13b", "mixtral-8x7b", "gpt2-xl")


def request(model: str = "llama-65b", machine: str = "spr-2", **extra: Any) -> TransformersRequest:
    given: dict[str, Any] = {"prompt": 64, "generated": 256, "sockets": 2, **extra}
    return TransformersRequest(
        model=load_model(model),
        machine=load_machine(machine),
        model_name=model,
        replay=None,
        prices=False,
        **given,
    )


def rows_of_seconds(model: str, machine: str) -> list[tuple[float, float, float]]:
    """Of every layout, some rows: seconds by the program, by the equations, and the bound."""
    executor = Transformers(request(model, machine))
    job, hardware = executor.job, executor.hardware()
    draw, found = random.Random(f"{model} {machine}"), []
    for layout in layouts(job, hardware):
        top = most_batches(job, hardware, layout)
        for count in {1, *(draw.randint(1, max(1, top)) for _ in range(3))} if top else ():
            program = SharesProgram(job, hardware, layout, batches=(count, count), unit_s=1.0)
            shares = program.solve()
            homes = None if shares is None else homes_of(job, hardware, layout, shares)
            if shares is None or homes is None:
                continue
            phases = phases_of_block(job, hardware, block_of(job, hardware, homes))
            bound = least_seconds(job, hardware, layout, top)
            found.append((shares.seconds * count, phases.total_s, bound * count))
    return found


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_program_takes_as_long_as_the_equations_and_no_less_than_its_bound(
    model: str, machine: str
) -> None:
    found = rows_of_seconds(model, machine)
    assert len(found) >= 2
    for program, equations, bound in found:
        assert program == pytest.approx(equations, rel=0.02)  # whole percents
        assert bound <= program * (1 + 1e-9)


def test_weights_are_copied_where_that_brings_more_than_the_margin() -> None:
    plan = plan_transformers(request(most_batches=1))
    assert plan.copies is not None
    assert plan.copies.used
    assert plan.copies.gain is not None
    machine = load_machine("spr-2")
    for kind in ("attention", "mlp", "head"):
        assert parse_policy(plan.policies[kind], machine) == Replicate((0, 1))
        first, second = plan.of(kind).values()
        assert first == second
    assert (
        "replicate" not in plan.policies["kv"] + plan.policies["norm"] + plan.policies["embedding"]
    )
    copied = sum(plan.of(kind)["rdram"] for kind in ("attention", "mlp", "head"))
    assert plan.copies.bytes == copied
    assert f"{copied / 2**30:.0f} GiB more memory" in plan.copies.reason
    alone = plan_transformers(request(most_batches=1, cxl_margin=plan.copies.gain + 1e-6))
    assert alone.copies is not None
    assert not alone.copies.used
    assert "below the margin" in alone.copies.reason
    assert plan.tokens_per_s / alone.tokens_per_s - 1 == pytest.approx(plan.copies.gain, rel=1e-3)
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan


def test_copies_gain_what_the_link_costs() -> None:
    """Of one long answer nearly all time is that of reading weights: by hand."""
    executor = Transformers(request(most_batches=1, generated=1000))
    hardware = executor.hardware()
    found = executor.search(hardware)
    one = executor.search(replace(hardware, copies=False))
    assert found is not None
    assert one is not None
    weights = sum(executor.job.kinds[kind].bytes for kind in ("attention", "mlp", "head"))
    near = hardware.nodes[0].read_bytes_per_s
    across = hardware.sockets[0].crossings[0].rates[1]
    # Interleaved, a socket reads a quarter of all bytes across: half of its half.
    slower = max(weights / 4 / across, weights / 2 / near) / executor.job.engine.products_share
    faster = weights / 2 / near / executor.job.engine.products_share
    assert slower > faster
    saved = one.choice.phases.decode_token_s - found.choice.phases.decode_token_s
    assert saved == pytest.approx(slower - faster, rel=0.02)


@pytest.mark.slow(reason="prices hundreds of placements")
@pytest.mark.parametrize("machine", ["spr-2", "xeon6430", "epyc9354-cxl-a"])
@pytest.mark.parametrize("limit", [None, 90 << 30, 140 << 30])
def test_no_random_placement_is_faster_than_the_plan(machine: str, limit: int | None) -> None:
    limits = {} if limit is None else {"ldram": limit}
    asked = request(machine=machine, limits=limits, most_batches=24)
    executor = Transformers(replace(asked, machine=with_gpu(asked.machine, "none")))
    hardware = executor.hardware()
    best = executor.search(hardware)
    assert best is not None
    draw = random.Random(f"{machine} {limit}")
    every = list(layouts(executor.job, hardware))
    rates = [random_rate(executor, draw.choice(every), draw) for _ in range(400)]
    assert max(rates) <= best.tokens_per_s * (1 + 1e-9)
    assert max(rates) > best.tokens_per_s / 2  # the draws are not all poor


def random_rate(executor: Transformers, layout: Layout, draw: random.Random) -> float:
    """Tokens/s of any shares and rows; 0 where they do not fit."""
    job, hardware = executor.job, executor.hardware()
    rows = draw.randint(1, 24)
    shares = {}
    for name in (ON_CPU, IDLE, KV):
        raw = [draw.random() ** 2 * node.read_bytes_per_s for node in hardware.nodes]
        shares[name] = tuple(each / sum(raw) for each in raw)
    found = homes_of(job, hardware, layout, Shares(shares, 0.0, 0.0, rows, 1.0))
    if found is None:
        return 0.0
    return phases_of_block(job, hardware, block_of(job, hardware, found)).tokens_per_s


def test_without_room_for_two_there_is_one() -> None:
    room = {"ldram": 100 << 30, "rdram": 100 << 30}  # 121 GiB of weights
    plan = plan_transformers(request(most_batches=1, limits=room))
    assert plan.copies is not None
    assert not plan.copies.used
    assert plan.copies.reason == "there is no room for 121 GiB on ldram and rdram each"
    assert {home.where for home in plan.homes if home.kind == "mlp"} == {"ldram", "rdram"}


def test_many_rows_are_not_planned_over_copies() -> None:
    """Layers of more rows than the kernel's are torch's, which reads one copy."""
    plan = plan_transformers(request("opt-13b"))
    assert plan.batch.size > COPIED_ROWS
    assert plan.copies is not None
    assert not plan.copies.used
    assert f"slower with them, for layers of more than {COPIED_ROWS} rows" in plan.copies.reason


def test_of_short_answers_prompts_decide_against_copies() -> None:
    plan = plan_transformers(request("opt-13b", "emr-3", most_batches=1, prompt=8, generated=2))
    assert plan.copies is not None
    assert "slower with them, for prompts are torch's" in plan.copies.reason


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", ["llama-65b", "mixtral-8x7b"])
def test_two_sockets_are_never_slower_than_one(model: str, machine: str) -> None:
    for rows in (1, 8, None):
        asked = request(model, machine, most_batches=rows)
        two, one = plan_transformers(asked), plan_transformers(replace(asked, sockets=1))
        assert two.tokens_per_s >= one.tokens_per_s * (1 - 1e-9)
        assert one.copies is None


def test_one_socket_is_taken_where_two_are_no_faster() -> None:
    """Across a link that carries next to nothing, and with one node to read from."""
    machine = load_machine("spr-2")
    slow = tuple(
        replace(each, read_bandwidth_bytes_per_s=1e8) if (each.initiator, each.target) == (0, 1)
        else each for each in machine.accesses
    )  # fmt: skip
    asked = replace(
        request(most_batches=1, tiers=("ldram",)), machine=replace(machine, accesses=slow)
    )
    plan = plan_transformers(asked)
    assert plan.copies is None
    assert sum(plan.threads.values()) == 24
    assert any("those of 2 are no faster" in note for note in plan.notes)


def test_copies_are_held_against_one_socket_where_that_is_faster_than_two_with_one_copy() -> None:
    asked = request(machine="xeon6430", most_batches=1)  # across its link come 27 GB/s
    plan, one = plan_transformers(asked), plan_transformers(replace(asked, sockets=1))
    assert plan.copies is not None
    assert plan.copies.gain == pytest.approx(plan.tokens_per_s / one.tokens_per_s - 1, rel=1e-3)
    kept = plan_transformers(replace(asked, cxl_margin=plan.copies.gain * 1.01))
    assert kept.copies is None
    assert kept.tokens_per_s == pytest.approx(one.tokens_per_s)


def test_every_core_is_a_thread_of_the_plan() -> None:
    plan = plan_transformers(request(most_batches=1))
    assert plan.threads == {0: 24, 1: 24}
    with_card = plan_transformers(request(most_batches=1, cxl_margin=0.0))
    assert sum(with_card.threads.values()) == 48


def test_why_says_what_copies_and_sockets_bring() -> None:
    plan = plan_transformers(request(most_batches=1, why=True))
    (one_copy,) = [why for why in plan.why if "in one copy, which takes" in why]
    assert plan.copies is not None
    assert plan.copies.gain is not None
    assert f"{plan.copies.gain / (1 + plan.copies.gain):.1%} slower" in one_copy
    assert [why for why in plan.why if why.startswith("with the cores of one socket: ")]
    kept = plan_transformers(request("opt-13b", why=True))
    assert [why for why in kept.why if "with a copy near each socket: " in why]
    one = plan_transformers(request(most_batches=1, why=True, sockets=1))
    (more,) = [why for why in one.why if "--sockets 2" in why]
    assert "faster" in more


@pytest.mark.parametrize("machine", ["xeon8470-cxl-b", "xeon6430", "epyc9354-cxl-a", "spr-2"])
@pytest.mark.parametrize("model", ["llama-65b", "mixtral-8x7b"])
def test_replay_of_both_sockets_agrees_with_the_equations(model: str, machine: str) -> None:
    """The simulator has a queue for each socket, and its paths and nodes."""
    for rows in (1, 64, None):
        executor = Transformers(request(model, machine, most_batches=rows))
        hardware = executor.hardware()
        for allowed in (True, False):
            found = executor.search(replace(hardware, copies=allowed))
            assert found is not None
            equations = executor.equation_seconds(found)
            replayed = executor.replayed_seconds(found, simulated_seconds)
            for phase, seconds in equations.items():
                assert replayed[phase] == pytest.approx(seconds, rel=0.05), (rows, allowed, phase)


@pytest.mark.parametrize("machine", machine_names())
def test_every_shipped_machine_with_two_sockets_is_planned_and_replayed(machine: str) -> None:
    asked = replace(request("opt-13b", machine, most_batches=4), replay=simulated_seconds)
    if sockets_with_cores(asked.machine) < 2:
        with pytest.raises(ConfigError, match="2 sockets: "):
            plan_transformers(asked)
        return
    plan = plan_transformers(asked)
    assert not [note for note in plan.notes if "replay" in note]


def test_trace_of_a_plan_names_whose_cpus_read_what() -> None:
    executor = Transformers(request(most_batches=1))
    found = executor.search(executor.hardware())
    assert found is not None
    assert found.choice.homes.layout.copied
    trace = planned_trace(executor.job, found.hardware, executor.block(found))
    read: Counter[tuple[str, str, int | None, int]] = Counter()
    for event in trace:
        assert (event.cpus is None) == (event.engine != "cpu")
        for node, nbytes in event.read_bytes.items():
            read[event.phase, event.tensor_kind, event.cpus, node] += nbytes
    copied = sum(executor.job.kinds[kind].bytes for kind in ("attention", "mlp", "head"))
    assert read["decode", "copies", 0, 0] == pytest.approx(copied / 2, rel=1e-6)
    assert read["decode", "copies", 1, 1] == pytest.approx(copied / 2, rel=1e-6)
    assert read["decode", "copies", 0, 1] == read["decode", "copies", 1, 0] == 0
    assert read["decode", "kv", 0, 1] == read["decode", "kv", 1, 1] > 0
    # Prompts read the first copy, half of it across.
    for core in (0, 1):
        assert read["prefill", "weights", core, 0] == pytest.approx(copied / 2, rel=1e-3)
    assert Trace.from_json(trace.to_json()) == trace


def test_notes_say_that_nothing_was_measured() -> None:
    notes = make_plan(Transformers(request(most_batches=1))).notes
    assert any("no plan for several sockets was ever measured" in note for note in notes)
    assert any("prompts read the first copy" in note for note in notes)
