"""Fleets: the fewest servers, what memory is worth, and what a card may cost."""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.arrivals import load_arrivals
from cxl_offload.plan.fleet.cache import load_requests
from cxl_offload.plan.fleet.prices import Prices, ServerMemory, cost_per_hour, prices_of
from cxl_offload.plan.fleet.search import FULL, FleetPlanner, options
from cxl_offload.plan.fleet.streams import DrawnStream, RequestStream, TraceStream
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import load_plan, save_plan
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.vllm.serving import TokenTargets
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB

PRICES = Prices(server=40000, dram=5, cxl=3, card=1500, watts=1500, card_watts=25, kwh=0.2)
MACHINE = "spr3-h100"


def planner(stream: RequestStream, target: TokenTargets, *, machine: str = MACHINE) -> FleetPlanner:
    prompt, generated = (round(each) for each in stream.lengths())
    request = VllmRequest(
        model=load_model("llama-2-7b"),
        machine=load_machine(machine),
        prompt=prompt,
        generated=generated,
        model_name="llama-2-7b",
        replay=None,
    )
    return FleetPlanner(request, stream, target)


def written(path: Path, requests: list[tuple[float, int, int, list[int]]]) -> Path:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(keys, one, strict=True))) for one in requests))
    return path


def conversations(
    seed: int, count: int, *, people: int = 40, rate: float = 5.0
) -> list[tuple[float, int, int, list[int]]]:
    """Requests of conversations that go on: each prompt begins with all of the one before."""
    draw, now, known = random.Random(seed), 0.0, dict[int, int]()
    made = []
    for _ in range(count):
        now += 1e3 * draw.expovariate(rate)
        who = draw.randrange(people)
        known[who] = known.get(who, 0) % 6 + 1
        blocks = [100 * who + at for at in range(known[who])]
        made.append((now, 512 * len(blocks), draw.randrange(1, 60), blocks))
    return made


@pytest.mark.parametrize("rate", [2.0, 40.0, 900.0])
def test_one_server_fewer_misses_the_target(rate: float) -> None:
    target = TokenTargets(first_token=0.5)
    plans = planner(DrawnStream(rate, 512, 64), target)
    found = plans.option(512 * GIB, 0, PRICES)
    assert found.seen is not None
    assert found.seen.meets(target)
    if found.servers > 1:
        fewer = plans.option(512 * GIB, 0, PRICES, servers=found.servers - 1)
        assert fewer.load > FULL or fewer.seen is None or not fewer.seen.meets(target)


def test_servers_grow_with_the_rate_as_planned_throughput_says() -> None:
    target = TokenTargets(first_token=5.0)
    found = planner(DrawnStream(2000.0, 512, 64), target).option(512 * GIB, 0, PRICES)
    request = VllmRequest(
        model=load_model("llama-2-7b"), machine=load_machine(MACHINE), prompt=512, generated=64,
        model_name="llama-2-7b",
    )  # fmt: skip
    assert found.tokens_per_s == pytest.approx(plan_vllm(request).tokens_per_s, rel=0.02)
    assert found.servers == pytest.approx(2000 * 64 / found.tokens_per_s, rel=0.1)


def test_servers_that_get_more_than_they_can_do_are_named_and_no_wait_is_promised() -> None:
    plans = planner(DrawnStream(900.0, 512, 64), TokenTargets(first_token=100.0))
    enough = plans.option(512 * GIB, 0, PRICES)
    assert 0.9 < enough.load <= FULL
    fewer = plans.option(512 * GIB, 0, PRICES, servers=int(enough.servers * enough.load) - 1)
    assert fewer.load > 1
    assert fewer.seen is None
    assert "requests wait ever longer" in fewer.reason


def test_ten_thousand_servers_take_seconds() -> None:
    begun = time.process_time()
    found = planner(DrawnStream(90_000.0, 512, 64), TokenTargets(first_token=1.0)).option(
        512 * GIB, 0, PRICES
    )
    assert 1000 < found.servers <= 10_000
    assert time.process_time() - begun < 8


def test_more_memory_for_kv_never_needs_more_servers(tmp_path: Path) -> None:
    trace = TraceStream(load_arrivals(written(tmp_path / "trace", conversations(1, 800))))
    plans = planner(trace, TokenTargets(first_token=0.25))
    found = [plans.option(size * GIB, 0, PRICES) for size in (8, 16, 64, 512)]
    assert [each.hit_rate for each in found] == sorted(each.hit_rate for each in found)
    assert found[-1].hit_rate > found[0].hit_rate
    assert found[0].servers >= found[-1].servers


def test_busy_is_the_share_of_time_with_what_the_caches_find(tmp_path: Path) -> None:
    """Ten prompts a second that are alike: one is computed, the others are found."""
    same = [(100.0 * at, 1536, 32, [1, 2, 3]) for at in range(300)]
    fresh = [(*one[:3], [3 * at, 3 * at + 1, 3 * at + 2]) for at, one in enumerate(same)]
    found = {
        name: planner(
            TraceStream(load_arrivals(written(tmp_path / name, requests))),
            TokenTargets(first_token=3.0),
        ).option(256 * GIB, 0, PRICES)
        for name, requests in (("same", same), ("fresh", fresh))
    }
    for option in found.values():
        assert option.seen is not None
        assert option.seen.first_token[1] < 3.0
        assert 0 < option.load < 1  # who is busy for longer keeps nobody's target for long
        asked = 10 * 32 / option.servers
        assert option.tokens_per_s == pytest.approx(asked / option.load)
    assert found["same"].load * found["same"].servers < 0.8 * (
        found["fresh"].load * found["fresh"].servers
    )


def test_a_card_at_its_break_even_price_costs_what_it_saves(tmp_path: Path) -> None:
    requests = conversations(2, 3000, people=600, rate=40.0)
    trace = TraceStream(load_arrivals(written(tmp_path / "trace", requests)))
    # An A10 computes a prompt more slowly than the card loads it.
    plans = planner(trace, TokenTargets(first_token=1.0), machine="epyc9354-cxl-a")
    sizes = [(16 * GIB, 0), (16 * GIB, 128 * GIB)]
    having = next(each for each in options(plans, sizes, PRICES) if each.memory.cxl_bytes)
    assert having.break_even_card is not None
    assert having.break_even_card > PRICES.card  # it saves servers
    prices = replace(PRICES, card=having.break_even_card)
    without, same = (plans.option(*each, prices) for each in sizes)
    assert same.cost_per_hour == pytest.approx(without.cost_per_hour)


def test_cost_is_what_was_bought_and_its_power() -> None:
    memory = ServerMemory(512 * GIB, 256 * GIB, 2)
    bought = 40000 + 512 * 5 + 256 * 3 + 2 * 1500
    power = (1500 + 2 * 25) / 1000 * 0.2
    assert cost_per_hour(PRICES, memory) == pytest.approx(bought / (4 * 8760) + power)


def test_a_target_below_the_prompt_alone_is_said_to_be_out_of_reach() -> None:
    found = planner(DrawnStream(5.0, 1500, 64), TokenTargets(first_token=1e-3)).option(
        512 * GIB, 0, PRICES
    )
    assert found.servers == 0
    assert "alone on a server 95 of 100 first tokens take" in found.reason


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs requests at two times"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n[]', "trace:2: want JSON"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "trace:1: .* a number"),
        (f'{{"timestamp": 1{"0" * 400}, "input_length": 5, "output_length": 1}}', "a number"),
        (f'{{"timestamp": 0, "input_length": 1{"0" * 20}, "output_length": 1}}', "up to"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "begins at 1"),
        ('{"timestamp": 0, "input_length": true, "output_length": 1}', "whole numbers"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1.5]}', "hash_ids"),
    ],
)
def test_traces_that_are_none_are_refused_with_their_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_arrivals(tmp_path / "trace")


def test_more_hashes_than_blocks_are_refused_with_their_line(tmp_path: Path) -> None:
    """Blocks of 16 tokens whose size is not said would be charged as blocks of 512."""
    trace = tmp_path / "trace"
    line = '{"timestamp": %d, "input_length": 1500, "output_length": 9, "hash_ids": %s}\n'
    trace.write_text("".join(line % (at, list(range(94))) for at in (0, 50)))
    assert len(load_arrivals(trace, block_tokens=16)) == 2
    assert len(load_requests(trace, block_tokens=16)) == 2
    for load in (load_arrivals, load_requests):
        with pytest.raises(ConfigError, match=r"trace:1: .*: 94 hash_ids .* blocks of 512"):
            load(trace, block_tokens=512)
    words = ["--model", "llama-3-8b", "--machine", MACHINE, "--trace", str(trace)]
    cache = CliRunner().invoke(app, ["plan", "cache", *words])
    prices = ["--price", "server=1", "--price", "dram=1", "--price", "card=1"]
    fleet = CliRunner().invoke(app, ["plan", "fleet", *words, "--ttft", "1s", *prices])
    for result in (cache, fleet):
        assert result.exit_code != 0
        assert "--block-tokens" in str(result.exception) + result.output


def test_memory_behind_cards_is_never_free_unasked() -> None:
    words = ["plan", "fleet", "--model", "llama-2-7b", "--machine", MACHINE, "--rate", "5"]
    words += ["--ttft", "9s", "--servers", "1", "--price", "server=1", "--price", "dram=1"]
    refused = CliRunner().invoke(app, words)
    assert "cxl and card not given" in str(refused.exception) + refused.output
    for more in (["--cxl", "0GiB"], ["--price", "card=0"]):
        assert CliRunner().invoke(app, [*words, *more]).exit_code == 0


def test_prices_are_asked_for_and_never_assumed() -> None:
    with pytest.raises(ConfigError, match="server and dram not given"):
        prices_of({"cxl": 3.0})
    with pytest.raises(ConfigError, match="price gpu: known are server, dram"):
        prices_of({"gpu": 3.0})
    with pytest.raises(ConfigError, match="years=0: from 0"):
        prices_of({"server": 1.0, "dram": 1.0, "years": 0.0})


@pytest.mark.slow(reason="plans for four machines")
def test_command_line_prints_the_cheapest_first() -> None:
    words = [
        "plan", "fleet", "--model", "llama-2-7b", "--machine", MACHINE, "--rate", "50",
        "--ttft", "1s", "--dram", "64GiB,512GiB", "--cxl", "0GiB,256GiB",
        "--price", "server=40000", "--price", "dram=5", "--price", "cxl=3",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["options"]
    costs = [each["cost_per_hour"] for each in found]
    assert len(found) == 4
    assert costs == sorted(costs)
    assert (found[0]["dram_bytes"], found[0]["cxl_bytes"]) == (64 * GIB, 0)  # nothing to cache
    printed = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert "a card pays below" in printed.output
    assert "in the currency of --price" in printed.output
    assert "never" in printed.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ttft", "1s"], "--trace FILE or --rate"),
        (["--ttft", "soon", "--rate", "5"], "--ttft"),
        (["--ttft", "1s", "--rate", "0"], "a number above 0"),
        (["--ttft", "1s", "--rate", "5", "--servers", "0"], "1 to 10000"),
        (["--ttft", "1s", "--rate", "5", "--cxl", "0GiB"], "price cxl: no server has CXL memory"),
        (["--ttft", "1s", "--rate", "5", "--dram", "0GiB"], "no host tier"),
        (["--ttft", "1s", "--rate", "5", "--dram", ","], "no size in it"),
        (
            ["--ttft", "1s", "--rate", "5", "--block-tokens", "16"],
            "--block-tokens 16: requests of --rate have no blocks",
        ),
        (
            ["--ttft", "1s", "--trace", "t.jsonl", "--prompt-len", "512"],
            "--prompt-len 512: --trace says the lengths",
        ),
        (
            ["--ttft", "1s", "--trace", "t.jsonl", "--gen-len", "9"],
            "--gen-len 9: --trace says the lengths",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(words: list[str], message: str) -> None:
    prices = ["--price", "server=1", "--price", "dram=1", "--price", "cxl=1"]
    result = CliRunner().invoke(
        app, ["plan", "fleet", "--model", "llama-2-7b", "--machine", MACHINE, *prices, *words]
    )
    assert result.exit_code != 0
    text = str(result.exception) if result.exception else result.output
    assert message in text + result.output


def test_cost_of_ownership_takes_the_tokens_of_two_plans(tmp_path: Path) -> None:
    files = []
    for tiers, name in ((("ldram",), "without"), (("ldram", "cxl"), "having")):
        request = InferenceRequest(
            model=load_model("opt-66b"), machine=load_machine("epyc9354-cxl-a"), prompt=512,
            generated=32, model_name="opt-66b", tiers=tiers, cxl_margin=0.0,
        )  # fmt: skip
        files.append(tmp_path / f"{name}.yaml")
        save_plan(plan_inference(request), files[-1])
    words = ["tco", "--without", str(files[0]), "--having", str(files[1]), "--r-t", "1.1", "--json"]
    result = CliRunner().invoke(app, [*words, "--n-baseline", "100", "--server-cost", "30000"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)["planned"]
    plans = [load_plan(each) for each in files]
    ratio = plans[0].tokens_per_s / plans[1].tokens_per_s
    assert ratio < 1
    assert found["servers_cxl"] == pytest.approx(100 * ratio)
    assert found["saving"] == pytest.approx(1 - 1.1 * ratio)
    assert found["cost_cxl"] == pytest.approx(100 * ratio * 1.1 * 30000)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e-320, 1e308])
def test_rates_that_no_service_has_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="requests/s: a number above 0 is needed, from 1e-09 to"):
        DrawnStream(rate, 512, 128)


def test_servers_of_several_gpus_are_faster_and_each_has_its_part_of_a_block() -> None:
    words = ["plan", "fleet", "--model", "llama-3-70b", "--machine", MACHINE, "--rate", "1"]
    words += ["--ttft", "100s", "--cxl", "0GiB", "--price", "server=1", "--price", "dram=1"]

    def first(*more: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*words, *more, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)["options"][0]
        return found

    one, four = first(), first("--gpus", "4")
    assert four["servers"] <= one["servers"]
    assert four["tokens_per_s_of_a_server"] > 4 * one["tokens_per_s_of_a_server"]  # all resident
    assert four["first_token_s"]["p50"] < one["first_token_s"]["p50"] / 4
    wrong = CliRunner().invoke(app, [*words, "--gpus", "3"])
    assert "do not divide" in wrong.output + str(wrong.exception)
