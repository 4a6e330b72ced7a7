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


@pytest.fixture(scope="module")
def phased(train: Train) -> list[Any]:
    job = {"stage": 2, "steps": 24}
    tune = {"tune": "phase_time", "tune_budget_bytes": 1 << 30}
    tuned = job | {"policy": SPREAD, "tune": tune}
    many = {"accumulation": 2, "steps": 10}
    threads = {"tune": tune | {"tune_threads": [1]}}
    return train(
        [job | {"stock": True}, tuned, job | many | {"stock": True}, tuned | many | threads]
    )


def test_phases_of_an_engine_are_tuned_and_losses_are_those_of_stock(phased: list[Any]) -> None:
    stock, tuned, stock_of_many, tuned_of_many = phased
    assert tuned["losses"] == stock["losses"]
    assert tuned["digest"] == stock["digest"]
    assert list(tuned["phases"]["shares"]) == ["forward", "backward", "optimizer"]
    assert sum(tuned["phases"]["decided"]) >= 1
    assert tuned_of_many["losses"] == stock_of_many["losses"]
    assert list(tuned_of_many["phases"]["shares"]) == ["forward and backward", "optimizer"]
    for run in (tuned, tuned_of_many):
        assert run["held_after_destroy"] == 0
        assert run["missed"] == []


def test_all_memory_comes_back(runs: list[Any]) -> None:
    for run in runs[1:]:
        assert run["held_after_destroy"] == 0
        assert run["missed"] == []
