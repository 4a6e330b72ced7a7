"""Threads of a plan: taken where the machine has its nodes and torch as many threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from cxl_offload.integrations.planned_threads import planned_threads
from cxl_offload.ops import threads as ops_threads
from cxl_offload.ops.threads import team_for, threads_by_default


def plan_of(**threads: int) -> Any:
    return SimpleNamespace(threads={int(node[1:]): count for node, count in threads.items()})


def machine_of(*nodes: int, simulated: bool = False) -> Any:
    machine = SimpleNamespace(nodes=[SimpleNamespace(id=node) for node in nodes])
    return SimpleNamespace(machine=machine, is_simulated=simulated)


@pytest.fixture
def five_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)


@pytest.mark.usefixtures("five_threads")
def test_threads_of_a_plan_for_this_machine_are_taken() -> None:
    found = planned_threads(plan_of(n0=4, n2=1), machine_of(0, 1, 2))
    assert found.counts == {0: 4, 2: 1}
    assert not found.notes


@pytest.mark.usefixtures("five_threads")
@pytest.mark.parametrize(
    ("plan", "session", "note"),
    [
        (None, machine_of(0), ""),
        (plan_of(n0=5), machine_of(0), ""),  # torch's own
        (plan_of(n0=4, n2=1), machine_of(0, 2, simulated=True), ""),
        (plan_of(n0=4, n7=1), machine_of(0, 2), "no node 7 here"),
        (plan_of(n0=4, n7=1), machine_of(0, 2, simulated=True), "no node 7 here"),
        (plan_of(n0=30, n2=2), machine_of(0, 2), "it counts with 32, and torch has 5 here; with "
         "OMP_NUM_THREADS=32 it has as many"),
    ],
)  # fmt: skip
def test_others_are_left_alone_and_it_is_said_why(plan: Any, session: Any, note: str) -> None:
    found = planned_threads(plan, session)
    assert found.counts is None
    assert note in "".join(found.notes)
    assert bool(found.notes) == bool(note)


def test_attention_and_linear_layers_have_the_planned_team(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    from cxl_offload.integrations.transformers import attention

    asked: list[Any] = []
    monkeypatch.setattr(attention, "team_for", asked.append)
    count = torch.get_num_threads()
    planned = {0: count, 1: 1}
    block = attention.BlockAttention(threads=planned)
    assert asked == [count]  # torch has one thread fewer
    monkeypatch.setattr(torch, "get_num_threads", lambda: count + 1)
    block.choose_threads()
    assert asked == [count, planned]


def test_a_default_holds_inside_of_its_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ops_threads, "_team", lambda key, cpus: asked.append(key))
    with threads_by_default({0: 2, 1: 1}):
        team_for(None)
        team_for(3)  # who names a number has it
    team_for(None)
    assert asked == [((0, 2), (1, 1)), 3, None]
