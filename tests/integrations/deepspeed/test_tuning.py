"""Engines whose optimizer tensors follow a tuner: the same bits, and pages that moved."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Train

STREAMED = ("fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq")
SPREAD = dict.fromkeys(STREAMED, "interleave:ldram,cxl@64KiB")
STEPS = 32  # the first makes the states, three warm up, twenty are a window, then pages move


@pytest.fixture(scope="module", params=[2, 3])
def runs(train: Train, request: pytest.FixtureRequest) -> list[Any]:
    job = {"stage": request.param, "steps": STEPS}
    tuned = job | {"policy": SPREAD}
    move = {"tune": "step_time", "tune_budget_bytes": 1 << 30}
    return train(
        [job | {"stock": True}, tuned | {"tune": move}, tuned | {"tune": {"tune": "step_time"}}]
    )


def test_losses_are_those_of_stock_while_tensors_move(runs: list[Any]) -> None:
    stock, moved, advised = runs
    assert moved["losses"] == stock["losses"]
    assert moved["digest"] == stock["digest"] == advised["digest"]


def test_pages_leave_a_share_that_cannot_be_best_with_a_budget_only(runs: list[Any]) -> None:
    _, moved, advised = runs
    assert moved["tuned"]["decisions"] >= 1
    # Half the bytes on a card with a tenth of the bandwidth: every tuner begins by moving them.
    assert moved["tuned"]["granted"] < 0.4
    assert advised["tuned"]["granted"] == pytest.approx(0.5, abs=0.05)
    assert moved["tuned"]["nbytes"] == advised["tuned"]["nbytes"] > 0


def test_all_memory_comes_back(runs: list[Any]) -> None:
    for run in runs[1:]:
        assert run["held_after_destroy"] == 0
        assert run["missed"] == []
