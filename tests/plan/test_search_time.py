"""Plans for machines of many nodes take no longer than somebody waits for them."""

from __future__ import annotations

from typing import Any

import pytest

from cxl_offload.plan.executor import Executor
from cxl_offload.plan.flexgen import planner
from cxl_offload.plan.flexgen.bound import least_seconds
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.plan import FlexGen, InferenceRequest
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.solve import Program
from cxl_offload.plan.transformers.plan import Transformers, TransformersRequest
from cxl_offload.plan.what_if import with_memory
from cxl_offload.topology import Machine, load_machine

MOST_PROGRAMS = 400
"""Linear and mixed-integer programs of a plan with its prices; each takes some milliseconds."""
MOST_BOUNDS = 1_000_000
"""Times that the bound of one number of batches is worked out for one cut of the weights."""


def machine_of_twelve_nodes() -> Machine:
    machine = load_machine("epyc9354-cxl-a")
    for at in range(9):
        machine = with_memory(machine, f"cxl={32 + 8 * at}GiB:{20 + 3 * at}GB/s:{250 + 10 * at}ns")
    return machine


def plan_for_twelve_nodes(build: Any) -> Plan:
    kind = InferenceRequest if build is FlexGen else TransformersRequest
    executor: Executor[Any] = build(
        kind(
            model=load_model("opt-66b"),
            machine=machine_of_twelve_nodes(),
            prompt=512,
            generated=32,
            model_name="opt-66b",
        )
    )
    return make_plan(executor)


@pytest.mark.parametrize("build", [FlexGen, Transformers])
def test_few_programs_are_solved_for_a_plan_over_twelve_nodes(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = []
    solve = Program.solve
    monkeypatch.setattr(Program, "solve", lambda self: solved.append(1) or solve(self))
    plan = plan_for_twelve_nodes(build)
    assert len(solved) < MOST_PROGRAMS
    assert len(plan.prices) > 30
    assert plan.cxl.used


def test_few_bounds_are_worked_out_for_the_prices_of_twelve_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def counted(job: FlexGenJob, hardware: Any, mode: Any, levels: Any, batches: Any) -> Any:
        asked.append(len(levels) * len(batches))
        return least_seconds(job, hardware, mode, levels, batches)

    monkeypatch.setattr(planner, "least_seconds", counted)
    plan_for_twelve_nodes(FlexGen)
    assert sum(asked) < MOST_BOUNDS
