"""Steps that cannot be the shortest are not placed; those that can are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.training import placement, search
from cxl_offload.plan.training.placement import TrainingStep, fastest, least_step_s
from cxl_offload.plan.training.plan import DeepSpeed
from cxl_offload.plan.training.request import TrainingRequest
from cxl_offload.topology import load_machine

from .placed import place


def deepspeed() -> DeepSpeed:
    machine = load_machine("epyc9354-cxl-a")
    return DeepSpeed(
        TrainingRequest(model=load_model("opt-6.7b"), machine=machine, batch=16, tokens=512)
    )


def every_step() -> list[tuple[TrainingStep, Hardware]]:
    executor = deepspeed()
    hardware = executor.hardware()
    slower = tuple(
        replace(node, read_bytes_per_s=2e9, copy_bytes_per_s=1e9) for node in hardware.nodes
    )
    every = (hardware, replace(hardware, nodes=slower))
    return [(each.step, offered) for offered in every for each in executor._space.steps(offered)]


def test_no_placement_undercuts_the_least_seconds() -> None:
    loose = 0
    for step, hardware in every_step():
        placed = place(step, hardware)
        assert placed is not None
        least = least_step_s(step, hardware)
        assert least <= placed[1].step_s * (1 + 1e-9)
        loose += least < 0.9 * placed[1].step_s
    assert loose > 0


def test_step_is_placed_as_without_a_limit_or_not_at_all() -> None:
    for step, hardware in every_step():
        placed = place(step, hardware)
        assert placed is not None
        assert place(step, hardware, most_s=placed[1].step_s) == placed
        assert place(step, hardware, most_s=placed[1].step_s * (1 - 1e-5)) is None


def test_plan_is_the_same_where_every_step_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, solved = deepspeed(), []
    solve = placement._solve

    def counted(*arguments: Any) -> Any:
        solved.append(1)
        return solve(*arguments)

    monkeypatch.setattr(placement, "_solve", counted)
    found = executor.search(executor.hardware())
    few = len(solved)
    monkeypatch.setattr(search, "fastest", lambda step, hardware, most_s: fastest(step, hardware))
    solved.clear()
    assert executor.search(executor.hardware()) == found
    assert 0 < few < len(solved)
