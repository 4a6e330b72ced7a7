"""The one way to a plan: what the executor says is in it, and what is common to all is added."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.executor import OwnFields
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Serving, parse_plan, plan_text
from cxl_offload.plan.replay_check import Replay

from .toy_executor import GIB, Toy


def planned(**asked: Any) -> tuple[Toy, Any]:
    toy = Toy(lambda hw: 5.0 + len(hw.nodes), **asked)
    return toy, make_plan(toy)


def test_plan_has_what_the_executor_found() -> None:
    toy, plan = planned()
    nodes = toy.hardware().nodes
    assert (plan.model, plan.machine, plan.executor) == ("opt-125m", "epyc9354-cxl-a", "flexgen")
    assert (plan.command, plan.runs, plan.advice) == (("toy", "toy"), True, "")
    assert plan.tokens_per_s == 5.0 + len(nodes), "with CXL memory, for it is worth the margin"
    assert plan.node_bytes == {node.node: GIB for node in nodes}
    assert (plan.gpu_bytes, plan.drive_bytes) == (3 * GIB, 0), "the drive brings nothing"
    assert plan.cxl.used
    assert plan.prices
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan


SERVES = OwnFields(
    threads={0: 3},
    policies={"kv": "bind:cxl", "mlp": "gpu"},
    on_cpu=("mlp",),
    kv_dtype="float8_e5m2",
    serving=Serving(first_token_s=2.0, alone_s=1.0, per_token_s=0.5),
)
TRAINS = OwnFields(settings={"toy.json": "{}"}, state_dtype="bfloat16", checkpointing=True)


@pytest.mark.parametrize(
    ("runs", "executor", "own"),
    [("inference", "vllm", SERVES), ("training", "deepspeed", TRAINS)],
)
def test_plan_has_the_fields_that_only_its_executor_fills(
    runs: Any, executor: Any, own: OwnFields
) -> None:
    class Filling(Toy):
        kind = runs
        name = executor

        def own_fields(self, found: Any) -> OwnFields:
            return own

    plan = make_plan(Filling(lambda _: 1.0))
    for each in fields(OwnFields):
        assert getattr(plan, each.name) == getattr(own, each.name), each.name
    assert parse_plan(plan_text(plan), file="plan.yaml") == plan


def test_every_field_that_only_some_executors_fill_is_left_out_by_default() -> None:
    _, plan = planned()
    for each in fields(OwnFields):
        left_out = getattr(OwnFields(), each.name)
        assert getattr(plan, each.name) == left_out, each.name
        filled = [getattr(own, each.name) for own in (SERVES, TRAINS)]
        assert any(value != left_out for value in filled), f"no test fills {each.name}"


def test_homes_are_all_bytes_of_a_kind_and_their_shares() -> None:
    _, plan = planned()
    homes = {home.where: home for home in plan.homes}
    assert sum(home.percent for home in plan.homes) == pytest.approx(100.0)
    assert homes["gpu"].bytes == 3 * GIB
    assert homes["cxl"].policy == "bind:cxl"
    assert "nvme" not in homes


def test_replay_that_disagrees_is_among_the_notes_and_none_is_made_unasked() -> None:
    toy, plan = planned()
    assert toy.replays == 1
    *_, own, replayed = plan.notes
    assert own == "a note of the toy's"
    assert "a replay of the decode takes 2 s (simulated)" in replayed
    toy, plan = planned(replay=None)
    assert toy.replays == 0
    assert plan.notes[-1] == "a note of the toy's"


def test_machine_that_cannot_be_replayed_is_planned_for_with_a_note() -> None:
    class Unknown(Toy):
        def replayed_seconds(self, found: Any, replay: Replay) -> Any:
            raise ConfigError("no rate of the link")

    assert make_plan(Unknown(lambda _: 1.0)).notes[-1] == "not replayed: no rate of the link"


def test_reasons_are_worked_out_only_when_asked_for() -> None:
    toy, plan = planned()
    assert plan.why == ()
    asked, explained = planned(why=True)
    assert explained.why
    assert len(asked.seen) > len(toy.seen)


def test_prices_are_searched_for_unless_nobody_asks_and_the_plan_is_the_same() -> None:
    priced, plan = planned()
    toy, plain = planned(prices=False)
    assert plan.prices
    assert plain == replace(plan, prices=())
    assert len(toy.seen) < len(priced.seen)


def test_model_that_the_executor_refuses_is_advice() -> None:
    class Refusing(Toy):
        def refusal(self) -> str:
            return "toys run no OPT"

    plan = make_plan(Refusing(lambda _: 1.0))
    assert (plan.runs, plan.advice) == (False, "toys run no OPT")
