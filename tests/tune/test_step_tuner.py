"""Decisions carried out on tensors of a simulated machine, asserted by asking the pages."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cxl_offload import zeros
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import (
    Bounds,
    Decision,
    ModelTuner,
    StepRecording,
    StepTuner,
    TierRatios,
    TunedHomes,
    Window,
    replay_recording,
)
from cxl_offload.units import MIB

NEAR, FAR = 0, 2


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


def states(session: Session, count: int = 4, nbytes: int = 24 * MIB) -> dict[str, torch.Tensor]:
    return {
        f"state{at}": zeros(nbytes, dtype=torch.uint8, policy=f"bind:{NEAR}", session=session)
        for at in range(count)
    }


class Scripted:
    """A tuner that answers given shares."""

    def __init__(self, *shares: float) -> None:
        self.share = 0.0
        self._next = list(shares)
        self.asked: list[Bounds] = []

    def decide(self, window: Window, bounds: Bounds = Bounds()) -> Decision:  # noqa: B008 - frozen
        self.asked.append(bounds)
        self.share = self._next.pop(0) if self._next else self.share
        return Decision(self.share, f"as the script says: {self.share}")

    def hold(self, share: float) -> None:
        self.share = share

    def saved(self) -> dict[str, object]:
        return {"share": self.share, "next": list(self._next)}

    def restore(self, saved: dict[str, object]) -> None:
        self.share, self._next = saved["share"], list(saved["next"])  # type: ignore[assignment, call-overload]


def run(tuner: StepTuner, steps: int) -> None:
    for _ in range(steps):
        tuner.step(0.01)


def test_pages_are_where_the_last_decision_says(session: Session) -> None:
    tensors = states(session)
    for at, one in enumerate(tensors.values()):
        one.fill_(at + 1)
    homes = TunedHomes(tensors, near=[NEAR], far=[FAR], session=session)
    tuner = StepTuner(homes, Scripted(0.5, 1.0, 0.0, 1 / 6), budget_bytes_per_step=1 << 30, steps=4)
    seen = []
    for _ in range(200):
        before = tuner.decisions
        tuner.step(0.01)
        if tuner.decisions > before:
            run(tuner, 1)
            seen.append(homes.granted())
    assert seen[:4] == pytest.approx([0.5, 1.0, 0.0, 1 / 6], abs=0.05)
    assert all(bool((one == at + 1).all()) for at, one in enumerate(tensors.values()))


def test_no_more_moves_between_two_steps_than_the_budget(session: Session) -> None:
    homes = TunedHomes(states(session), near=[NEAR], far=[FAR], session=session)
    tuner = StepTuner(homes, Scripted(1.0), budget_bytes_per_step=12 * MIB, steps=2, warm_up=0)
    run(tuner, 2)
    for moves in range(1, 9):
        run(tuner, 1)
        assert homes.granted() <= moves * 12 * MIB / homes.nbytes + 1e-9
    assert homes.granted() == 1.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [1.0, 1 / 6, 0.5])
def test_one_large_tensor_moves_in_parts_that_add_up_to_one_move(
    session: Session, share: float
) -> None:
    nbytes, budget = 512 * MIB, 96 * MIB
    (one,) = states(session, 1, nbytes).values()
    one[::4096] = 7
    homes = TunedHomes({"one": one}, near=[NEAR], far=[FAR], session=session)
    homes.aim(share)
    moved = calls = 0
    while homes.pending_bytes:
        calls += 1
        before = homes.granted()
        moved += homes.advance(budget).nbytes
        assert moved <= calls * budget
        assert (homes.granted() - before) * nbytes <= 2 * budget
    assert 6 <= calls <= 8
    other = zeros(nbytes, dtype=torch.uint8, policy=homes.policy(share), session=session)
    for begin in range(0, nbytes, 8 * MIB):
        of_one, of_other = (
            session.bytes_per_node(each.data_ptr() + begin, 8 * MIB) for each in (one, other)
        )
        assert of_one == of_other
    owner = session.find(one.data_ptr())
    assert owner is not None
    assert owner.notes == []
    assert bool((one[::4096] == 7).all())


def test_new_target_in_the_middle_of_a_tensor_begins_with_what_is_there(session: Session) -> None:
    (one,) = states(session, 1, 256 * MIB).values()
    homes = TunedHomes({"one": one}, near=[NEAR], far=[FAR], session=session)
    homes.aim(1.0)
    homes.advance(64 * MIB)
    assert homes.granted() == 0.25
    homes.aim(0.0)
    assert homes.share == pytest.approx(0.25)
    while homes.pending_bytes:
        homes.advance(64 * MIB)
    assert homes.granted() == homes.share == 0.0


def test_nothing_moves_without_a_budget(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    homes = TunedHomes(states(session), near=[NEAR], far=[FAR], session=session)
    seen: list[Decision] = []
    tuner = StepTuner(homes, Scripted(0.5), steps=4, on_decision=seen.append)
    with caplog.at_level("INFO", "cxl_offload.tune"):
        run(tuner, 60)
    assert homes.granted() == 0.0
    assert [one.share for one in seen] == [0.5]  # said once, not at every window
    assert "advice only" in caplog.text


def test_tuner_is_told_what_room_there_is(session: Session) -> None:
    tensors = states(session)
    total = sum(one.numel() for one in tensors.values())
    filled = session.free_bytes(FAR) - total // 4
    session.kernel.set_used_by_others(FAR, filled)
    script = Scripted(0.1)
    homes = TunedHomes(tensors, near=[NEAR], far=[FAR], session=session)
    run(StepTuner(homes, script, budget_bytes_per_step=1 << 30, steps=4, warm_up=0), 4)
    assert script.asked[0].lowest == 0.0
    assert script.asked[0].highest == pytest.approx(0.25, abs=0.02)


def test_full_node_stops_the_moves_and_loses_nothing(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = states(session)
    for at, one in enumerate(tensors.values()):
        one.fill_(at + 1)
    homes = TunedHomes(tensors, near=[NEAR], far=[FAR], session=session)
    script = Scripted(1.0)
    tuner = StepTuner(homes, script, budget_bytes_per_step=1 << 30, steps=2, warm_up=0)
    run(tuner, 2)
    reserve = 1 << 30  # of a node of this size, see docs/reliability.md
    session.kernel.set_used_by_others(FAR, session.free_bytes(FAR) - reserve - 30 * MIB)
    run(tuner, 10)
    assert "moves stopped" in caplog.text
    assert homes.granted() == pytest.approx(0.25)  # one of four tensors fitted
    assert script.share == pytest.approx(0.25)  # windows from now on are measured at this share
    assert homes.bounds().highest == pytest.approx(0.25, abs=0.02)
    assert all(bool((one == at + 1).all()) for at, one in enumerate(tensors.values()))


def test_state_survives_a_restart(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "tuner.json"
    tensors = states(session)

    def make() -> tuple[StepTuner, ModelTuner, TunedHomes]:
        model = ModelTuner(TierRatios(0.5, 2.0))
        homes = TunedHomes(tensors, near=[NEAR], far=[FAR], session=session)
        return (
            StepTuner(homes, model, budget_bytes_per_step=1 << 30, steps=4, state=file),
            model,
            homes,
        )

    first, before, _ = make()
    run(first, 40)
    second, after, homes = make()
    assert after.saved() == before.saved()
    run(second, 3)
    assert homes.granted() == pytest.approx(before.share, abs=0.05)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"tuner": "climb"}', "[" * 100_000])
def test_damaged_state_file_is_named(session: Session, tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuner.json"
    file.write_text(text)
    homes = TunedHomes(states(session, 1), near=[NEAR], far=[FAR], session=session)
    with pytest.raises(ConfigError, match=r"tuner\.json"):
        StepTuner(homes, ModelTuner(TierRatios(0.5, 2.0)), state=file)


def test_tensors_of_others_are_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="'w' is not in memory of this session"):
        TunedHomes({"w": torch.zeros(1024)}, near=[NEAR], far=[FAR], session=session)
    with pytest.raises(ValueError, match="near nodes"):
        TunedHomes({}, near=[0], far=[0], session=session)


def test_settled_tuner_decides_less_often_and_wakes_when_the_work_changes(session: Session) -> None:
    homes = TunedHomes(states(session, count=1), near=[NEAR], far=[FAR], session=session)
    made: list[int] = []
    steps = 0
    tuner = StepTuner(
        homes, ModelTuner(TierRatios(0.1, 2.0)), budget_bytes_per_step=1 << 30, steps=4, warm_up=0,
        on_decision=lambda decision: made.append(steps),
    )  # fmt: skip
    for steps in range(600):
        tuner.step(1.0 + 5 * homes.share + 0.001 * (steps % 3))
    apart = [after - before for before, after in pairwise(made)]
    assert max(apart) == 64  # sixteen windows of four
    assert apart[-1] == 64
    made.clear()
    for steps in range(200):
        tuner.step(3.0 + 15 * homes.share + 0.001 * (steps % 3))
    apart = [after - before for before, after in pairwise(made)]
    assert min(apart) <= 8


def test_recording_replays_to_the_decisions_of_the_run(session: Session, tmp_path: Path) -> None:
    ratios = TierRatios(0.5, 2.0)
    recording = StepRecording(ratios)
    homes = TunedHomes(states(session), near=[NEAR], far=[FAR], session=session)
    live: list[Decision] = []
    tuner = StepTuner(
        homes, ModelTuner(ratios), budget_bytes_per_step=1 << 30, steps=4, recording=recording,
        on_decision=live.append,
    )  # fmt: skip
    for at in range(120):
        tuner.step(0.01 + 0.0001 * (at % 3))
    recording.save(tmp_path / "run.json")
    again = replay_recording(StepRecording.load(tmp_path / "run.json"), ModelTuner(ratios))
    assert [one.share for one in again][:2] == [one.share for one in live][:2]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"windows": []},
        {"windows": [{"share": 2, "mean_s": 1, "error": 0, "steps": 1}]},
        {"windows": [{"share": 0, "mean_s": -1, "error": 0, "steps": 1}]},
        {"ratios": 0},
        {"ratios": {"bandwidth": 0, "latency": 1}},
    ],
)
def test_hostile_recordings_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    sound = {
        "version": 1,
        "ratios": {"bandwidth": 0.5, "latency": 2},
        "windows": [{"share": 0, "mean_s": 1, "error": 0.01, "steps": 20}],
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps(sound | change))
    with pytest.raises(ConfigError, match=r"run\.json"):
        StepRecording.load(file)
