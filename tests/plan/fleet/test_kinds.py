"""Several kinds of servers: the cheapest, a table of all, and two kinds side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cxl_offload.cli._fleet_prices import Priced, prices_by_machine
from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.arrivals import load_arrivals, on_their_own
from cxl_offload.plan.fleet.kinds import KindPlanner, ServerKind
from cxl_offload.plan.fleet.prices import Prices
from cxl_offload.plan.fleet.search import FleetPlanner
from cxl_offload.plan.fleet.streams import DrawnStream, RequestStream, TraceStream
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.vllm.plan import VllmRequest
from cxl_offload.plan.vllm.serving import TokenTargets
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB

LARGE, SMALL, NO_GPU = "spr3-h100", "epyc9354-cxl-a", "xeon6126-host"
MODEL = "llama-2-7b"
TARGET = TokenTargets(first_token=2.0)
PRICES = {LARGE: Prices(server=200_000, dram=5), SMALL: Prices(server=16_000, dram=5)}


def written(path: Path, lengths: Sequence[tuple[int, int]], *, per_s: float = 10.0) -> Path:
    """Requests of these prompts and answers, at random times, none of which begins as another."""
    draw, now = random.Random(3), 0.0
    lines: list[str] = []
    for prompt, generated in lengths:
        now += 1e3 * draw.expovariate(per_s)
        entry = {"timestamp": now, "input_length": prompt, "output_length": generated}
        lines.append(json.dumps({**entry, "hash_ids": [len(lines)]}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def unlike(tmp_path: Path) -> Path:
    """Nine short prompts to a long one."""
    draw = random.Random(5)
    lengths = [(3000, 16) if at % 10 == 0 else (draw.randrange(64, 128), 64) for at in range(600)]
    return written(tmp_path / "trace.jsonl", lengths)


def kind(machine: str, stream: RequestStream, *, dram: int = 128 * GIB) -> ServerKind:
    prompt, generated = (round(each) for each in stream.lengths())
    request = VllmRequest(
        model=load_model(MODEL), machine=load_machine(machine), prompt=prompt,
        generated=generated, model_name=MODEL, replay=None,
    )  # fmt: skip
    return ServerKind(request=request, sizes=[(dram, 0)], prices=PRICES.get(machine, PRICES[SMALL]))


def run(*words: str) -> Result:
    base = ["plan", "fleet", "--model", MODEL, "--ttft", "3s", "--price", "dram=5"]
    return CliRunner().invoke(app, [*base, *words], env={"COLUMNS": "200"})


def found(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output + str(done.exception)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


BOTH = ("--machine", LARGE, "--machine", SMALL, "--rate", "40", "--cxl", "0GiB")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("price", "cheapest"), [("20000", LARGE), ("900000", SMALL)])
def test_the_cheapest_kind_is_a_matter_of_prices(price: str, cheapest: str) -> None:
    document = found(*BOTH, "--price", f"{LARGE}:server={price}", "--price", "server=20000")
    assert document["machine"] == cheapest
    assert [each["machine"] for each in document["kinds"]].index(cheapest) == 0
    costs = [each["cheapest"]["cost_per_million_tokens"] for each in document["kinds"]]
    assert costs[0] < costs[1]
    assert {each["machine"] for each in document["options"]} == {LARGE, SMALL}
    assert document["mixture"] is None  # all prompts are alike
    for each in document["kinds"]:
        assert each["cheapest"]["first_token_s"]["p95"] <= 3.0


def test_each_kind_is_answered_as_it_is_alone() -> None:
    both = found(*BOTH, "--price", "server=20000")
    for machine in (LARGE, SMALL):
        words = ("--machine", machine, "--rate", "40", "--cxl", "0GiB", "--price", "server=20000")
        alone = found(*words)
        assert alone["machine"] == machine
        assert {"kind", "model", "machine", "requests_per_s", "options"} <= set(alone)
        mine = [each for each in both["options"] if each["machine"] == machine]
        assert mine == alone["options"]


def test_kind_that_cannot_be_planned_is_named_with_its_reason() -> None:
    words = (*BOTH, "--machine", NO_GPU, "--price", "server=20000")
    document = found(*words)
    assert document["kinds"][-1]["machine"] == NO_GPU
    assert document["kinds"][-1]["cheapest"] is None
    assert "has no GPU" in document["kinds"][-1]["reason"]
    printed = run(*words)
    assert f"The cheapest kind: 3 servers {LARGE} with" in printed.stdout
    assert f"{NO_GPU}: machine {NO_GPU} has no GPU" in printed.stdout


def test_machines_of_which_none_can_be_planned_are_refused() -> None:
    words = ("--machine", NO_GPU, "--machine", "xeon6430", "--rate", "1", "--price", "server=1")
    done = run(*words)
    assert done.exit_code != 0
    assert "has no GPU" in done.output + str(done.exception)


def test_sizes_of_cxl_are_those_of_machines_that_have_some() -> None:
    words = ("--machine", "dgx-h100", "--machine", SMALL, "--rate", "5", "--price", "server=1")
    document = found(*words, "--cxl", "0GiB,128GiB", "--price", "cxl=3")
    sizes = {(each["machine"], each["cxl_bytes"]) for each in document["options"]}
    assert sizes == {("dgx-h100", 0), (SMALL, 0), (SMALL, 128 * GIB)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--price", "a10:server=3"), "--price a10:server=3: no machine a10 is compared; there is"),
        (("--price", f"{LARGE}:server=3"), f"{SMALL}: prices: server not given"),
        (("--price", "server=3", "--price", f"{LARGE}:cxl=3"), f"{LARGE}: price cxl: no server"),
        (("--price", "server=3", "--price", f"{LARGE}:dram=x"), f"--price {LARGE}: dram=x"),
        (
            ("--price", "server=3", "--price", "kwh=1", "--price", f"{LARGE}:watts=9"),
            f"{SMALL}: price kwh: nothing draws power",
        ),
        (("--price", "server=3", "--machine", LARGE), f"--machine {LARGE} is given twice"),
        (("--price", "server=3", "--profile", "p.json"), "--profile p.json: it is of one machine"),
    ],
)
def test_what_says_nothing_of_several_machines_is_refused(
    words: tuple[str, ...], message: str
) -> None:
    done = run(*BOTH, *words)
    assert done.exit_code != 0
    assert message in done.output + str(done.exception)


def test_two_machines_of_one_name_are_refused(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "configs" / "machines" / f"{LARGE}.yaml"
    (tmp_path / "mine.yaml").write_text(shipped.read_text())
    words = ("--machine", LARGE, "--machine", str(tmp_path / "mine.yaml"), "--rate", "5")
    done = run(*words, "--price", "server=1")
    assert f"two are called {LARGE}" in done.output + str(done.exception)


def test_prices_of_a_machine_whose_name_has_choices() -> None:
    machine = Priced(names=("xeon8468", "xeon8468:snc=4"), has_cards=True)
    other = Priced(names=("other",), has_cards=False)
    texts = ["server=1", "dram=2", "cxl=7", "xeon8468:snc=4:server=3"]
    assert prices_by_machine(texts, [machine, other]) == [
        Prices(server=3, dram=2, cxl=7),
        Prices(server=1, dram=2),  # it has no card to pay
    ]


def test_mixture_is_two_fleets_that_each_meet_the_target(unlike: Path) -> None:
    stream = TraceStream(load_arrivals(unlike))
    kinds = [kind(each, stream) for each in (LARGE, SMALL)]
    mixture = KindPlanner(kinds, stream, TARGET).mixture()
    assert mixture is not None
    assert mixture.short.machine != mixture.long.machine
    cost = 0.0
    for part, requests in zip(
        (mixture.short, mixture.long), stream.split(mixture.longest), strict=True
    ):
        own = kind(part.machine, requests)
        alone = FleetPlanner(own.request, requests, TARGET).option(128 * GIB, 0, own.prices)
        assert alone.servers == part.option.servers
        assert alone.seen is not None
        assert alone.seen.meets(TARGET)
        assert part.share == pytest.approx(len(requests.arrivals) / len(stream.arrivals))
        cost += alone.cost_per_hour
    assert mixture.cost_per_hour == pytest.approx(cost)
    tokens = stream.rate * stream.lengths()[1]
    assert mixture.cost_per_million == pytest.approx(cost / 3600 / tokens * 1e6)


def test_no_pair_that_was_tried_is_cheaper_than_the_mixture(unlike: Path) -> None:
    stream = TraceStream(load_arrivals(unlike))
    kinds = [kind(each, stream) for each in (LARGE, SMALL)]
    mixture = KindPlanner(kinds, stream, TARGET).mixture()
    assert mixture is not None
    short, long = stream.split(mixture.longest)
    swapped = [
        FleetPlanner(own.request, requests, TARGET).option(128 * GIB, 0, own.prices)
        for requests, part in ((short, mixture.long), (long, mixture.short))
        for own in [kind(part.machine, requests)]
    ]
    assert not all(each.servers for each in swapped) or (
        sum(each.cost_per_hour for each in swapped) >= mixture.cost_per_hour
    )


def test_requests_that_are_alike_or_few_make_no_mixture(tmp_path: Path) -> None:
    alike = TraceStream(load_arrivals(written(tmp_path / "alike", [(100, 9)] * 100)))
    few = [(100 + at, 9) for at in range(30)]
    of_few = TraceStream(load_arrivals(written(tmp_path / "few", few)))
    for stream in (alike, of_few, DrawnStream(5.0, 100, 9)):
        kinds = [kind(each, stream) for each in (LARGE, SMALL)]
        assert KindPlanner(kinds, stream, TARGET).mixture() is None


def test_parts_of_a_trace_have_its_rate_together_and_their_own_caches(tmp_path: Path) -> None:
    """A conversation whose second prompt is long finds nothing on the servers of long ones."""
    path = tmp_path / "trace"
    entries: list[tuple[int, int, list[int]]] = [
        (0, 512, [1]), (1000, 512, [2]), (2000, 1024, [1, 3]), (3000, 1024, [1, 3]),
    ]  # fmt: skip
    keys = ("timestamp", "input_length", "hash_ids")
    lines = [dict(zip(keys, each, strict=True)) | {"output_length": 4} for each in entries]
    path.write_text("\n".join(map(json.dumps, lines)))
    stream = TraceStream(load_arrivals(path))
    assert stream.arrivals[2].needs[0] < float("inf")
    short, long = stream.split(512)
    assert short.rate + long.rate == pytest.approx(stream.rate)
    assert [each.prompt for each in long.arrivals] == [1024, 1024]
    assert long.arrivals[0].needs == (float("inf"), float("inf"))
    assert max(long.arrivals[1].needs) == 2  # of its own first one
    assert [each.seconds for each in long.arrivals] == [2.0, 3.0]
    again = on_their_own([replace(each, needs=()) for each in stream.arrivals])
    assert again == list(stream.arrivals)


def test_command_line_compares_the_mixture_with_one_kind(unlike: Path) -> None:
    words = (
        "--machine", LARGE, "--machine", SMALL, "--trace", str(unlike), "--cxl", "0GiB",
        "--dram", "128GiB", "--price", f"{LARGE}:server=200000", "--price", f"{SMALL}:server=16000",
    )  # fmt: skip
    document = found(*words)
    mixture = document["mixture"]
    assert {mixture["short"]["machine"], mixture["long"]["machine"]} == {LARGE, SMALL}
    total = mixture["short"]["cost_per_hour"] + mixture["long"]["cost_per_hour"]
    assert mixture["cost_per_hour"] == pytest.approx(total)
    printed = run(*words).stdout
    assert f"The best mixture: prompts of up to {mixture['longest_short_prompt']} tokens" in printed
    best = document["kinds"][0]["cheapest"]["cost_per_million_tokens"]
    less = mixture["cost_per_million_tokens"] < best
    assert ("less than one kind" in printed) == less
    assert found(*words, "--servers", "9")["mixture"] is None


def test_config_errors_of_prices_are_one_line() -> None:
    with pytest.raises(ConfigError, match="no machine b is compared; there is a"):
        prices_by_machine(["b:server=1"], [Priced(names=("a",), has_cards=False)])
