"""Memory that is placed once: what one run measures decides where the next run's regions go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Bind
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.topology import load_machine
from cxl_offload.tune import (
    ModelTuner,
    NewRegions,
    StepRecording,
    StepWatch,
    decisions,
    replay_recording,
)
from cxl_offload.tune.curves import SHARES

MACHINE = load_machine("xeon8470-cxl-b")  # 307 GB/s and 46 % of a remote socket's
SATURATED = TwoTierStep(
    latency_ns=(100.0, 250.0),
    bandwidth_bytes_per_s=(130e9, 60e9),
    lines_in_flight=900.0,
    memory_bytes=1e9,
)


def one_run(state: Path, *, load: int = 8, steps: int = 300, places: bool = True) -> NewRegions:
    regions = NewRegions(MACHINE, state=state, places=places)
    seconds = SATURATED.seconds(regions.share)
    for step in range(steps):
        regions.step(seconds * (1 + 0.002 * (step % 3)), load=load)
    return regions


def test_share_of_new_regions_is_learned_from_start_to_start(tmp_path: Path) -> None:
    state = tmp_path / "run.json"
    shares = [one_run(state).share for _ in range(8)]
    assert shares[0] == 0.0
    assert shares[1] > 0.0
    best = min(SATURATED.seconds(share) for share in SHARES)
    assert SATURATED.seconds(shares[-1]) <= 1.03 * best
    assert SATURATED.seconds(0.0) > 1.2 * best
    assert NewRegions(MACHINE, state=state).policy() != Bind((0,))


def test_windows_of_all_runs_are_in_the_state_file_and_can_be_replayed(tmp_path: Path) -> None:
    state = tmp_path / "run.json"
    shares = [one_run(state).share for _ in range(3)]
    recording = StepRecording.load(state)
    assert [share for share, _ in recording.windows] == [share for share in shares for _ in "12345"]
    told: list[tuple[int, int]] = []
    replayed = replay_recording(
        recording,
        ModelTuner(recording.ratios),
        progress=lambda done, total: told.append((done, total)),
    )
    assert replayed[0].share > 0
    assert told == [(done, len(replayed)) for done in range(1, len(replayed) + 1)]


def test_regions_of_a_run_keep_their_share(tmp_path: Path) -> None:
    regions = one_run(tmp_path / "run.json", steps=2000)
    assert regions.share == 0.0


def test_steps_of_another_load_are_left_out(tmp_path: Path) -> None:
    state = tmp_path / "run.json"
    one_run(state)
    before = json.loads(state.read_text())
    one_run(state, load=64)
    assert json.loads(state.read_text()) == before


def test_advice_is_counted_as_advice(tmp_path: Path) -> None:
    def advised() -> int:
        return sum(
            one.count
            for one in decisions()
            if (one.framework, one.tuner, one.outcome) == ("script", "share", "advised")
        )

    before = advised()
    one_run(tmp_path / "run.json", places=False)
    assert advised() > before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"load": 3}', '{"load": "x", "model": {}}'])
def test_damaged_state_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="state"):
        NewRegions(MACHINE, state=file)


def test_only_steps_between_decodes_of_like_size_are_timed() -> None:
    seen: list[int] = []

    class Regions:
        def step(self, seconds: float, *, load: int) -> None:
            assert seconds >= 0
            seen.append(load)

    watch = StepWatch(Regions())  # type: ignore[arg-type]
    planned = [(4, 4), (4, 4), (4, 100), (4, 4), (4, 4), (3, 3), (0, 0), (3, 3), (3, 3)]
    for sequences, tokens in planned:
        watch.begins(sequences, tokens)
    assert seen == [4, 4, 3]
