"""Counts of what routers ask for: right, and never waited for on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.integrations.transformers import router_counts
from cxl_offload.integrations.transformers.router_counts import RouterCounts

LAYERS = {"first": 3, "second": 4}


class Event:
    """Stands in for an event of an accelerator, which this machine lacks."""

    has_passed = False

    def __init__(self, device: torch.device) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.has_passed


class Calls(TorchDispatchMode):
    """Names of the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        if func.__name__ == "copy_.default":
            assert args[2] is True, "a copy that waits"
        return func(*args, **(kwargs or {}))


def ask(counts: RouterCounts, **asked: list[list[int]]) -> None:
    for name, rows in asked.items():
        counts.note(name, torch.tensor(rows))


def test_experts_count_once_a_pass_and_those_of_other_ranks_do_not() -> None:
    counts = RouterCounts(LAYERS)
    ask(counts, first=[[0, 2], [2, 0]], second=[[3, -1], [4, 3]])
    assert counts.pass_ends().tolist() == [1, 0, 1, 0, 0, 0, 1]
    ask(counts, first=[[1]])
    assert counts.pass_ends().tolist() == [0, 1, 0, 0, 0, 0, 0]


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> RouterCounts:
    """Counts that take this machine's memory for that of an accelerator."""
    real = router_counts._Lane

    class Lane(real):  # type: ignore[misc, valid-type]
        def __init__(self, total: int, device: torch.device) -> None:
            super().__init__(total, device)
            self._host = torch.zeros_like(self._passes)
            self._event = Event(device)

    monkeypatch.setattr(router_counts, "_Lane", Lane)
    return RouterCounts(LAYERS)


def test_counts_come_when_their_copy_has_arrived_and_none_is_lost(
    on_accelerator: RouterCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(on_accelerator, first=[[0]])
    assert on_accelerator.pass_ends() is None  # the copy has just been queued
    ask(on_accelerator, first=[[1]], second=[[0]])
    assert on_accelerator.pass_ends() is None
    ask(on_accelerator, first=[[1]])
    monkeypatch.setattr(Event, "has_passed", True)
    assert on_accelerator.pass_ends().tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert on_accelerator.pass_ends().tolist() == [0, 2, 0, 1, 0, 0, 0]
    assert on_accelerator.pass_ends().sum() == 0


def test_nothing_of_a_pass_waits_for_an_accelerator(on_accelerator: RouterCounts) -> None:
    asked = torch.tensor([[0, 2], [1, 2]])
    ask(on_accelerator, first=[[0]])
    on_accelerator.pass_ends()
    with Calls() as calls:
        on_accelerator.note("first", asked)
        on_accelerator.pass_ends()
    waits = ("nonzero", "_local_scalar_dense", "index.Tensor", "_to_copy", "unique")
    assert calls.names
    assert not [name for name in calls.names if name.startswith(waits)]
