"""What no tuner may be told, and files that no training may fail for."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload import tune
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.topology import load_machine


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


def homes(session: Session, *, near: list[int] | None = None, far: list[int] | None = None) -> Any:
    tensor = cxl_offload.zeros(1 << 20, policy="bind:0", session=session)
    return tune.TunedHomes({"w": tensor}, near=near or [0], far=far or [2], session=session)


def test_a_state_that_cannot_be_written_is_logged_and_the_step_goes_on(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    param = torch.nn.Parameter(torch.ones(1 << 14))
    with cxl_offload.use(session), caplog.at_level(logging.WARNING):
        optimizer = CPUAdam([param], policy="bind:0")
        state = folder / "s.json"
        tuned = tune.tune_optimizer(optimizer, state=state, budget_bytes_per_step=1 << 20)
        for step in range(80):
            if step == 10:
                shutil.rmtree(folder)
            param.grad = torch.ones_like(param)
            optimizer.step()
        assert tuned.tuner is not None
        assert tuned.tuner.decisions >= 1
        tuned.remove()
    assert "the state stays unsaved" in caplog.text
    assert "folder" in caplog.text


def test_a_folder_that_is_not_there_is_said_at_once(session: Session, tmp_path: Path) -> None:
    optimizer = CPUAdam([torch.nn.Parameter(torch.ones(8))])
    with cxl_offload.use(session), pytest.raises(ConfigError, match="folder is not there"):
        tune.tune_optimizer(optimizer, state=tmp_path / "missing" / "s.json")


@pytest.mark.parametrize("share", [-1.0, 1.1, math.nan, math.inf])
def test_shares_outside_of_0_to_1_are_refused_and_later_ones_move(
    session: Session, share: float
) -> None:
    found = homes(session)
    with pytest.raises(ValueError, match="from 0 to 1"):
        found.aim(share)
    found.aim(1 + 1e-12)  # rounding
    found.advance(1 << 40)
    assert found.granted() == 1.0


def test_nodes_that_are_not_there_are_refused_when_tensors_are_taken(session: Session) -> None:
    with pytest.raises(ValueError, match="99"):
        homes(session, far=[99])
    with pytest.raises(ValueError, match="-1"):
        homes(session, near=[-1])


@pytest.mark.parametrize("budget", [-1, math.nan])
def test_budgets_that_mean_nothing_are_refused_before_a_step(
    session: Session, budget: float
) -> None:
    optimizer = CPUAdam([torch.nn.Parameter(torch.ones(8))])
    with cxl_offload.use(session), pytest.raises(ValueError, match="budget"):
        tune.tune_optimizer(optimizer, budget_bytes_per_step=budget)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget"):
        tune.StepTuner(homes(session), tune.Climb(), budget_bytes_per_step=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "x", [], {}, -1.0, 0.0])
def test_windows_that_are_none_are_refused_with_their_file(
    session: Session, tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "state.json"
    window = {"mean_s": value, "error": 0.001, "steps": 20}
    saved = {"tuner": "climb", "weight": 3, "step": 1, "previous_weight": 3, "previous": window}
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"state\.json"):
        tune.StepTuner(homes(session), tune.Climb(), state=path)


def test_a_saved_time_longer_than_the_world_is_old_is_refused(
    session: Session, tmp_path: Path
) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    path = tmp_path / "state.json"
    saved = {"tuner": "model", "at": 0, "calm": 0, "measured": {"0": [1e30, 1e-4]}}
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"state\.json"):
        tune.StepTuner(homes(session), tune.ModelTuner(ratios), state=path)


def test_hot_rows_follow_an_embedding_that_is_called_by_keyword(session: Session) -> None:
    embedding = torch.nn.Embedding(4000, 64)
    weight = cxl_offload.from_tensor(embedding.weight.data, policy="bind:2", session=session)
    embedding.weight = torch.nn.Parameter(weight)
    expected = embedding(torch.tensor([3]))
    rows = tune.HotRows(embedding, near=[0], far=[2], room_bytes=1 << 18, session=session)
    with rows.following():
        assert torch.equal(embedding(input=torch.tensor([3])), expected)
