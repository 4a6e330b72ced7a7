"""The search for transformers leaves nothing better in its own space: numbers of rows one by one,
the neighbours that ``why`` compares, and machines with less memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.compare import best_without_idle_tiers
from cxl_offload.plan.hardware import NVME
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.prices import resources
from cxl_offload.plan.transformers.layout import layouts, most_batches
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.plan.transformers.program import SharesProgram
from cxl_offload.plan.transformers.queues import compared
from cxl_offload.plan.transformers.search import ANYTHING, _Search
from cxl_offload.topology import load_machine, machine_names

GIB = 1 << 30

MACHINES = ("desktop-4090", "dgx2-v100", "epyc9354-cxl-a", "xeon-t4", "zen4-1", "zen4-3")
LENGTHS = ((512, 32), (64, 512))
LARGE = "every machine file with one of five models, in turn: several minutes"
MODELS = ("llama-2-7b", "llama-3-70b", "mixtral-8x7b", "opt-66b", "qwen2.5-0.5b")
LOST = 0.01
"""By which a neighbour may be faster: percents that do not fit cost one sequence in a hundred, and
a cache in two places is taken only where it brings as much."""


def request(model: str, machine: str, prompt: int, generated: int, **extra: Any) -> Any:
    return TransformersRequest(
        model=load_model(model),
        machine=load_machine(machine),
        prompt=prompt,
        generated=generated,
        model_name=model,
        replay=None,
        prices=False,
        **extra,
    )


def numbers(most: int) -> Iterator[int]:
    """Few rows one by one, and more of them a fiftieth apart."""
    count = 1
    while count <= most:
        yield count
        count = max(count + 1, int(count * 1.02))
    yield most


@pytest.mark.parametrize("machine", ["zen4-3", "zen4-1", "xeon6430"])
def test_no_number_of_rows_is_faster_where_few_rows_ask_for_few_experts(machine: str) -> None:
    executor = Transformers(request("mixtral-8x7b", machine, 64, 512))
    job, hardware = executor.job, executor.hardware()
    found = executor.search(hardware)
    assert found is not None
    (layout,) = layouts(job, hardware)
    most = most_batches(job, hardware, layout)
    best = {}
    for count in numbers(most):
        program = SharesProgram(job, hardware, layout, batches=(count, count), unit_s=100.0)
        shares = program.solve()
        best[count] = math.inf if shares is None else shares.seconds
    rate = job.generated / min(best.values())
    assert found.tokens_per_s >= rate * (1 - 1e-6)
    assert found.tokens_per_s == pytest.approx(found.choice.phases.tokens_per_s, rel=0.02)
    few = SharesProgram(job, hardware, layout, batches=(1, most), unit_s=100.0).solve()
    assert few is not None
    assert job.generated / few.seconds > found.tokens_per_s  # all rows as if they asked for few


def test_working_memory_of_cpus_lies_where_the_first_node_is_full() -> None:
    """Without any local memory the plan has 4899 rows; 100 MB of it used to bring them to 8."""
    rates, homes = [], []
    for limits in ({"ldram": 0}, {"ldram": GIB // 10}, {"ldram": 16 * GIB}, {}):
        executor = Transformers(request("mixtral-8x7b", "zen4-3", 64, 512, limits=limits))
        found = executor.search(executor.hardware())
        assert found is not None
        rates.append(found.tokens_per_s)
        homes.append(found.choice.homes)
        job, hardware = executor.job, found.hardware
        assert sum(homes[-1].work) == job.work_bytes(homes[-1].rows)
        assert all(
            have <= node.usable_bytes for have, node in zip(found.host, hardware.nodes, strict=True)
        )
    assert rates == sorted(rates)
    assert homes[1].work[0] <= GIB // 10 < homes[1].work[1]
    roomy = Transformers(request("llama-2-7b", "zen4-3", 64, 512, most_batches=1))
    alone = roomy.search(roomy.hardware())
    assert alone is not None
    assert alone.choice.homes.work == (roomy.job.work_bytes(1), 0)


def check_neighbours(model: str, machine: str, prompt: int, generated: int) -> int:
    """No single change is faster; returns how many there are, none where nothing fits."""
    executor = Transformers(request(model, machine, prompt, generated, cxl_margin=0.0))
    try:
        found, _, _ = best_without_idle_tiers(executor)
    except MemoryError:
        return 0
    others = [
        (what, other)
        for what, other in executor.other_homes(found)
        if other is not None and "of 2 sockets" not in what  # more cores than were asked for
    ]
    for what, other in others:
        assert other.tokens_per_s <= found.tokens_per_s * (1 + LOST), (model, machine, what)
    return len(others)


def check_limits(model: str, machine: str, prompt: int, generated: int) -> int:
    """No tier with more room makes a plan slower; returns how many plans are compared."""
    compared = 0
    tiers = [tier.name for tier in load_machine(machine).tiers if tier.name != NVME]
    for tier in tiers:
        best = 0.0
        for room in (0.1, 1, 16, 64, 256, None):
            limits = {} if room is None else {tier: int(room * GIB)}
            asked = request(model, machine, prompt, generated, cxl_margin=0.0, limits=limits)
            try:
                found, _, _ = best_without_idle_tiers(Transformers(asked))
            except (ConfigError, MemoryError):  # more than there is, or too little for one sequence
                continue
            compared += 1
            assert found.tokens_per_s >= best * (1 - LOST), (model, machine, tier, room)
            best = max(best, found.tokens_per_s)
    return compared


@pytest.mark.slow(reason="prices every neighbour of a plan")
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_no_neighbour_is_faster_than_the_plan(machine: str, tokens: tuple[int, int]) -> None:
    models = ("llama-2-7b", "mixtral-8x7b")
    assert sum(check_neighbours(model, machine, *tokens) for model in models) >= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "machine", "prompt", "generated"),
    [
        ("mixtral-8x7b", "zen4-3", 64, 512),
        ("mixtral-8x7b", "xeon6430", 512, 32),
        ("mixtral-8x7b", "zen5-1", 64, 512),
        ("opt-30b", "dgx-h100", 64, 512),
        ("opt-66b", "epyc9354-cxl-a", 512, 32),
        ("llama-2-7b", "desktop-4090", 512, 32),
    ],
)
def test_more_room_in_a_tier_is_never_slower(
    model: str, machine: str, prompt: int, generated: int
) -> None:
    assert check_limits(model, machine, prompt, generated) > 2


@pytest.mark.slow(reason=LARGE)
@pytest.mark.parametrize("machine", machine_names())
def test_no_neighbour_and_no_smaller_tier_is_faster_on_any_machine(machine: str) -> None:
    at = machine_names().index(machine)
    model, tokens = MODELS[at % len(MODELS)], LENGTHS[at // len(MODELS) % len(LENGTHS)]
    check_neighbours(model, machine, *tokens)
    check_limits(model, machine, *tokens)


def test_limit_passes_over_no_layout_that_undercuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts stand as they are compared, where a cache in two places comes later."""
    executor = Transformers(request("opt-66b", "epyc9354-cxl-a", 512, 32))
    job, hardware, seen = executor.job, executor.hardware(), list[str]()
    of_kv = {each.kv: each for each in layouts(job, hardware)}
    entries = [(1.0, 0, 1, of_kv["host"]), (0.999, 1, 1, of_kv["both"]), (2.0, 2, 1, of_kv["gpu"])]
    assert [compared(each[3], each[0]) for each in entries] == sorted(
        compared(each[3], each[0]) for each in entries
    )
    search = _Search(job, hardware, ANYTHING)
    search.limit_s = 1.0
    monkeypatch.setattr(search, "_relaxed", lambda layout, *_: seen.append(layout.kv))
    search.consider_all(entries)
    assert seen == ["both"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "machine"), [("opt-66b", "epyc9354-cxl-a"), ("mixtral-8x7b", "epyc9354-cxl-a")]
)
def test_search_from_what_is_known_finds_what_one_from_nothing_finds(
    model: str, machine: str
) -> None:
    """With one unit more of anything; what bounds several of these hardwares is kept."""
    executor = Transformers(request(model, machine, 512, 32))
    hardware = executor.hardware()
    found = executor.search(hardware)
    assert found is not None
    gains = []
    for each in resources(hardware):
        begun, whole = executor.search(each.more, like=found), executor.search(each.more)
        assert begun is not None
        assert whole is not None
        assert begun.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-9), each.what
        gains.append(begun.tokens_per_s / found.tokens_per_s - 1)
    assert max(gains) > 1e-4
    kinds = {each.of_nodes for each in resources(hardware) if each.of_nodes}
    assert len(found.choice.least) == len(kinds)
    bounded = any(found.choice.least.values())
    assert bounded == (model == "opt-66b"), "of Mixtral no other layout may be faster"
