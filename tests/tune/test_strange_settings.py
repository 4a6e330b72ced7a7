"""What no tuner may be told, and files that no training may fail for."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
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


def test_most_used_rows_follow_an_embedding_that_is_called_by_keyword(session: Session) -> None:
    embedding = torch.nn.Embedding(4000, 64)
    weight = cxl_offload.from_tensor(embedding.weight.data, policy="bind:2", session=session)
    embedding.weight = torch.nn.Parameter(weight)
    expected = embedding(torch.tensor([3]))
    rows = tune.MostUsedRows(embedding, near=[0], far=[2], room_bytes=1 << 18, session=session)
    with rows.following():
        assert torch.equal(embedding(input=torch.tensor([3])), expected)


def test_a_state_file_of_a_script_has_the_windows_for_replay(
    session: Session, tmp_path: Path
) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    for name, made in {"model": tune.ModelTuner(ratios), "climb": tune.Climb()}.items():
        state = tmp_path / f"{name}.json"
        tuner = tune.StepTuner(homes(session), made, budget_bytes_per_step=1 << 20, state=state)
        for _ in range(100):
            tuner.step(0.01)
        found = tune.StepRecording.load(state)
        assert len(found.windows) >= 2
        assert found.ratios == (ratios if name == "model" else None)
        assert tune.replay_recording(found, tune.Climb())


def test_advice_is_learned_from_all_windows_and_survives_a_restart(
    session: Session, tmp_path: Path
) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    state = tmp_path / "state.json"
    tuner = tune.StepTuner(homes(session), tune.ModelTuner(ratios), state=state)
    for step in range(400):
        tuner.step(0.01 + 1e-5 * (step % 3))
    saved = json.loads(state.read_text())
    assert set(saved["measured"]) == {"0"}
    once = 0.01 * 0.01 / 20  # of one window's variance
    assert saved["measured"]["0"][1] < once
    assert len(saved["recording"]["windows"]) >= 4
    assert tuner.homes.granted() == 0
    again = tune.ModelTuner(ratios)
    tune.StepTuner(homes(session), again, state=state)
    assert again.saved()["measured"] == saved["measured"]


def test_the_same_advice_is_given_once_and_asked_for_ever_less_often(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    tuner = tune.ModelTuner(ratios)
    asked = []
    decide = tuner.decide
    tuner.decide = lambda window, bounds: asked.append(window.steps) or decide(window, bounds)  # type: ignore[assignment, func-returns-value, misc]
    with caplog.at_level(logging.INFO):
        followed = tune.StepTuner(homes(session), tuner)
        for _ in range(2000):
            followed.step(0.01)
    assert asked[-1] == 320
    assert caplog.text.count("advice only") == followed.decisions <= 2


@pytest.mark.parametrize(
    "call",
    [
        lambda tuner: tuner.hold(math.nan),
        lambda tuner: tuner.hold(1.5),
        lambda tuner: tuner.hold(-1.0),
    ],
)
@pytest.mark.parametrize("kind", ["model", "climb", "caption"])
def test_no_tuner_holds_what_is_no_share(session: Session, kind: str, call: Any) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    makers = {"climb": tune.Climb, "caption": tune.PublishedCaption}
    made = makers[kind]() if kind in makers else tune.ModelTuner(ratios)
    with pytest.raises(ValueError, match="0"):
        call(made)


@pytest.mark.parametrize(
    "make",
    [
        lambda ratios: tune.ModelTuner(ratios, start=math.nan),
        lambda ratios: tune.PhaseTuner(ratios, ["a"], whole_move_s=math.nan),
        lambda ratios: tune.PhaseTuner(ratios, ["a"], whole_move_s=-1.0),
        lambda ratios: tune.MostUsedItems(4, 1).note([math.inf, 0, 0, 0]),
        lambda ratios: tune.TierRatios(math.nan, 2.0),
        lambda ratios: tune.TierRatios(0.5, 2.0, latency_error=math.nan),
        lambda ratios: tune.ThreadChoice([0, 1]),
        lambda ratios: tune.Window(1e308, 0.1, 4),
        lambda ratios: tune.Window.of([1e308, 1e308]),
        lambda ratios: tune.StepRecording(ratios).add(math.nan, tune.Window(1.0, 0.1, 4)),
    ],
)
def test_numbers_that_mean_nothing_are_refused(session: Session, make: Any) -> None:
    with pytest.raises(ValueError, match=r"\d|nan|uses"):
        make(tune.tier_ratios(session.machine, near=[0], far=[2]))


def test_steps_that_no_clock_can_measure_are_left_out(session: Session) -> None:
    tuner = tune.StepTuner(homes(session), tune.Climb(), budget_bytes_per_step=1 << 20, steps=2)
    for seconds in (1e308, 5e-324, math.inf, math.nan, -1.0, 0.0) * 10:
        tuner.step(seconds)
    assert tuner.decisions == 0


def test_a_recording_without_windows_is_refused_in_one_line(session: Session) -> None:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    with pytest.raises(ConfigError, match="no window"):
        tune.replay_recording(tune.StepRecording(ratios), tune.Climb())


def phase_steps(session: Session, state: Path | None = None) -> tune.PhaseSteps:
    ratios = tune.tier_ratios(session.machine, near=[0], far=[2])
    tuner = tune.PhaseTuner(ratios, ["prefill", "decode"], whole_move_s=1.0)
    return tune.PhaseSteps(homes(session), tuner, state=state)


def test_phases_refuse_names_and_parts_that_are_none(session: Session) -> None:
    steps = phase_steps(session)
    with pytest.raises(ValueError, match="no phase 'forward'; there are prefill, decode"):
        steps.step("forward", 1.0)
    with pytest.raises(ValueError, match="no phase"):
        steps.begin("")
    with pytest.raises(ValueError, match="no phase"), steps.phase("x"):
        pass
    with pytest.raises(ValueError, match="equal_parts"):
        steps.step("prefill", 1.0, equal_parts=0)


def test_a_damaged_state_of_phases_names_its_file(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "phases.json"
    path.write_text(json.dumps({"phases": {"tuner": "phases", "at": {}}, "threads": {}}))
    with pytest.raises(ConfigError, match=r"phases\.json"):
        phase_steps(session, path)


def test_new_regions_refuse_shares_and_loads_that_are_none(
    session: Session, tmp_path: Path
) -> None:
    regions = tune.NewRegions(session.machine, state=str(tmp_path / "state.json"))
    with pytest.raises(ValueError, match="share"):
        regions.placed(math.nan)
    with pytest.raises(TypeError, match="load"):
        regions.step(0.1, load=math.nan)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [(2**40,), (0,), ("8",), (1, 1)])
def test_numbers_of_threads_that_no_machine_has_are_refused(session: Session, threads: Any) -> None:
    with pytest.raises(ConfigError, match="tune_threads"):
        tune.read_tuning("phase_time", machine=session.machine, threads=threads)


@pytest.mark.parametrize("budget", [math.nan, -1, "1GiB", None])
def test_budgets_of_options_are_numbers_of_bytes(session: Session, budget: Any) -> None:
    with pytest.raises(ConfigError, match="tune_budget_bytes"):
        tune.read_tuning("step_time", machine=session.machine, budget_bytes=budget)


def test_a_budget_without_an_end_and_one_of_a_float_move_everything(session: Session) -> None:
    for budget in (math.inf, 256e6):
        found = homes(session)
        found.aim(1.0)
        found.advance(budget)  # type: ignore[arg-type]
        assert found.granted() == 1.0


def test_most_used_parts_that_overlap_or_are_empty_are_refused(session: Session) -> None:
    tensor = cxl_offload.zeros(1 << 20, policy="bind:2", session=session)
    at, page = tensor.data_ptr(), 1 << 16
    for parts in (
        {"a": [tune.Slice(at, page)], "b": [tune.Slice(at, page)]},
        {"a": [tune.Slice(at, page)], "b": [tune.Slice(at + page // 2, page)]},
        {"a": [tune.Slice(at, 0)], "b": [tune.Slice(at + page, 0)]},
    ):
        with pytest.raises(ValueError, match=r"overlap|at least 1"):
            tune.MostUsedParts(parts, near=[0], far=[2], room_bytes=page, session=session)


def test_most_used_rows_refuse_blocks_and_rooms_that_mean_nothing(session: Session) -> None:
    embedding = torch.nn.Embedding(4000, 64)
    weight = cxl_offload.from_tensor(embedding.weight.data, policy="bind:2", session=session)
    embedding.weight = torch.nn.Parameter(weight)
    for wrong in ({"block_bytes": 0}, {"room_bytes": -1}, {"room_bytes": math.nan}):
        options: Any = {"room_bytes": 1 << 18, **wrong}
        with pytest.raises(ValueError, match=next(iter(wrong))):
            tune.MostUsedRows(embedding, near=[0], far=[2], session=session, **options)


def test_threads_that_end_steps_together_take_turns(session: Session) -> None:
    tuner = tune.StepTuner(homes(session), tune.Climb(), budget_bytes_per_step=1 << 20, steps=2)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [tuner.step(0.01) for _ in range(200)], range(8)))
    assert tuner.decisions > 0


def test_a_forked_child_moves_nothing_and_goes_on(session: Session) -> None:
    tuner = tune.StepTuner(homes(session), tune.Climb(), budget_bytes_per_step=1 << 20, steps=2)
    with tuner._gate.lock:  # as if another thread were in a step
        child = os.fork()
        if not child:
            for _ in range(100):
                tuner.step(0.01)
            os._exit(0 if tuner.decisions == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("near", "far"), [([], [2]), ([0], []), ([0], [0]), ([0, 2], [2])])
def test_nodes_that_are_no_two_tiers_are_refused_everywhere(
    session: Session, near: list[int], far: list[int]
) -> None:
    with pytest.raises(ValueError, match="some of each"):
        tune.tier_ratios(session.machine, near=near, far=far)
    tensor = cxl_offload.zeros(1 << 20, policy="bind:0", session=session)
    with pytest.raises(ValueError, match="some of each"):
        tune.TunedHomes({"w": tensor}, near=near, far=far, session=session)
    with pytest.raises(TypeError, match="need a list"):
        tune.TunedHomes({"w": tensor}, near=0, far=[2], session=session)  # type: ignore[arg-type]
