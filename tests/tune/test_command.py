"""``cxl-offload tune --replay``: what a tuner makes of the state file of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from tests.tune.test_new_regions import one_run


@pytest.mark.parametrize("tuner", ["model", "climb", "caption"])
def test_state_file_of_a_run_is_replayed(tmp_path: Path, tuner: str) -> None:
    state = tmp_path / "run.json"
    shares = [one_run(state).share for _ in range(2)]
    done = CliRunner().invoke(app, ["tune", "--replay", str(state), "--tuner", tuner, "--json"])
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["tuner"] == tuner
    assert len(told["decisions"]) == 10  # five windows a run
    assert {one["measured_at"] for one in told["decisions"]} <= set(shares)
    table = CliRunner().invoke(app, ["tune", "--replay", str(state), "--tuner", tuner])
    assert table.exit_code == 0
    assert "step times measured in that run" in table.stdout


def test_file_without_windows_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"recording": {"version": 1, "ratios": {"bandwidth": 1, "latency": 1}}}')
    done = CliRunner().invoke(app, ["tune", "--replay", str(file)])
    assert done.exit_code == 2
    assert "not a recording" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("tuner", ["model", "climb", "caption"])
@pytest.mark.parametrize("error", [1e160, 1e308])
def test_window_that_says_nothing_is_replayed(tmp_path: Path, tuner: str, error: float) -> None:
    state = tmp_path / "run.json"
    one_run(state)
    saved = json.loads(state.read_text())
    for window in saved["recording"]["windows"][:2]:
        window["error"] = error
    state.write_text(json.dumps(saved))
    done = CliRunner().invoke(app, ["tune", "--replay", str(state), "--tuner", tuner])
    assert done.exit_code == 0, done.output


def test_key_that_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("{}")
    done = CliRunner().invoke(app, ["tune", "--replay", str(file)])
    assert done.exit_code == 2
    assert "not a recording of step times ('version' is missing)" in done.output
