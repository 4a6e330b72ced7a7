"""Regret of a plan among points whose speeds are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

pytest.importorskip("flexgen")

from benchmarks.measured_regret import Case, Point, regret_of
from benchmarks.regret_flexgen import keeps_to_limits
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.topology import load_machine

LONG = 1e6


class Runs:
    """Gives one rate after the other, the last one for ever, and counts."""

    def __init__(self, *rates: float) -> None:
        self._rates: Iterable[float] = itertools.chain(rates, itertools.repeat(rates[-1]))
        self._next = iter(self._rates)
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return next(self._next)


def case_of(planned: Runs, *others: Runs) -> Case:
    points = [Point(f"other {at}", run) for at, run in enumerate(others)]
    plan = Point("planned", planned)
    return Case("case", plan, 11.0, [plan, *points])


def test_regret_is_what_the_fastest_point_has_more() -> None:
    slow = Runs(8.0)
    found = regret_of(case_of(Runs(10.0), Runs(12.0), slow, Runs(11.0)), 3, LONG)
    assert found["best"] == "other 0"
    assert found["regret"] == pytest.approx(0.2)
    assert (found["points"], found["measured_tokens_per_s"]) == (4, 10.0)
    assert slow.count == 1  # far from the fastest: once


def test_luck_of_a_point_is_no_regret() -> None:
    """It was fast while it was compared, and is not when it runs beside the plan again."""
    lucky = Runs(13.0, 13.0, 13.0, 10.0)
    found = regret_of(case_of(Runs(10.0), lucky), 3, LONG)
    assert found["best"] == "other 0"
    assert found["regret"] == pytest.approx(0.0)


def test_plan_that_is_fastest_has_none() -> None:
    found = regret_of(case_of(Runs(10.0), Runs(9.0), Runs(9.9)), 3, LONG)
    assert (found["best"], found["regret"]) == ("planned", 0.0)


def test_without_time_the_plan_runs_and_the_row_says_so() -> None:
    others = [Runs(20.0), Runs(30.0)]
    found = regret_of(case_of(Runs(10.0), *others), 3, 0.0)
    assert found["points"] == 1
    assert [run.count for run in others] == [0, 0]


def test_the_grid_keeps_to_the_limits_of_the_plan() -> None:
    machine = load_machine("epyc9354-cxl-a")
    asked = InferenceRequest(
        model=load_model("opt-13b"),
        model_name="opt-13b",
        machine=machine,
        prompt=128,
        generated=32,
        limits={"ldram": 16 << 30, "rdram": 0, "cxl": 0},
        gpu_batches=(4,),
        most_batches=1,
        replay=None,
        prices=False,
    )
    plan = plan_inference(asked)
    assert keeps_to_limits(asked, plan, 50, 0)
    assert not keeps_to_limits(asked, plan, 0, 0)  # more than the host has
    assert not keeps_to_limits(asked, plan, 100, 100)  # more than the GPU has
