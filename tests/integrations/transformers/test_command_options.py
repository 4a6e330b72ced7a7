"""Options that ``cxl-offload generate`` has in common with ``cxl-offload flexgen``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.integrations import run_options
from cxl_offload.integrations.transformers import generation
from cxl_offload.tune import StepRecording

from .commands import command, run

KV = ("--place", "kv=cxl")
WEIGHTS = ("--place", "weights=bind:ldram", *KV)


def reported(folder: Path, file: Path, *more: str) -> dict[str, Any]:
    assert run(command(folder, *more, "--answers", "--json", str(file))) == 0
    return dict(json.loads(file.read_text()))


def test_row_ends_after_the_token_that_stops_it(folder: Path, tmp_path: Path) -> None:
    """The other row goes on, and what follows the token is padding."""
    file = tmp_path / "report.json"
    whole = reported(folder, file, *KV, "--gen-len", "8")
    first, other = (row[whole["prompt_len"] :] for row in whole["tokens"])
    stop = first[2]
    assert stop not in other
    at = first.index(stop)
    ended = reported(folder, file, *KV, "--gen-len", "8", "--stop", str(stop))
    rows = [row[whole["prompt_len"] :] for row in ended["tokens"]]
    assert rows == [[*first[: at + 1], *[1] * (7 - at)], other]


def test_parts_of_the_load_are_in_the_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reported(folder, tmp_path / "report.json", *WEIGHTS, "--gen-len", "2")
    made, read, both, rest = report["measured"]["load_parts"]
    kinds = [row for row in report["placement"] if row["kind"] != "kv"]
    assert made["bytes"] == read["bytes"] == sum(row["requested_bytes"] for row in kinds) > 0
    assert rest["bytes"] == both["bytes"] == 0
    seconds = sum(part["seconds"] for part in (made, read, rest))
    assert seconds - both["seconds"] == pytest.approx(report["measured"]["load_s"])
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"Load \(measured\): fault-in .* GB/s\), reading .* GB/s\), (both at once .*, )?rest ", told
    )


def test_warm_up_is_in_no_figure_and_changes_no_token(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    cold = reported(folder, file, *WEIGHTS, "--gen-len", "4", "--trace", str(tmp_path / "cold"))
    warm = reported(
        folder, file, *WEIGHTS, "--gen-len", "4", "--warmup", "--trace", str(tmp_path / "warm")
    )
    assert warm["tokens"] == cold["tokens"]
    assert warm["attention"] == cold["attention"]
    events = [json.loads((tmp_path / name).read_text()) for name in ("cold", "warm")]
    assert events[0] == events[1]


def test_warm_up_computes_the_prompts_once_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    stock = generation.Prompts.answered_by

    def counted(self: Any, model: Any, tokens: int, *watched: Any) -> Any:
        asked.append(tokens)
        return stock(self, model, tokens, *watched)

    monkeypatch.setattr(generation.Prompts, "answered_by", counted)
    reported(folder, tmp_path / "report.json", *KV, "--gen-len", "4", "--warmup")
    assert asked == [1, 4]


def test_tier_is_of_the_nodes_that_are_named(folder: Path, tmp_path: Path) -> None:
    """The machine says node 2; its name then stands for node 0."""
    file = tmp_path / "report.json"
    stock = reported(folder, file, *KV, "--gen-len", "2")
    moved = reported(folder, file, *KV, "--gen-len", "2", "--tier", "cxl=0")

    def nodes(report: dict[str, Any]) -> set[str]:
        (row,) = (row for row in report["placement"] if row["kind"] == "kv")
        return set(row["granted_bytes_per_node"])

    assert nodes(stock) == {"2"}
    assert nodes(moved) == {"0"}
    assert moved["tokens"] == stock["tokens"]


@pytest.mark.slow(reason="generates until a tuner has decided")
def test_weights_follow_the_time_of_the_tokens_and_the_next_run_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    tuned = ("--tune", "step_time", "--tune-budget", "1MiB", "--tune-state", str(state))
    stock = reported(folder, tmp_path / "report.json", *WEIGHTS, "--gen-len", "120")
    windows = []
    for _ in range(2):
        made = reported(folder, tmp_path / "report.json", *WEIGHTS, "--gen-len", "120", *tuned)
        assert made["tokens"] == stock["tokens"]
        assert made["simulated"] is None  # weights that move are in no trace
        windows.append(len(StepRecording.load(state).windows))
    assert 0 < windows[0] < windows[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--tier", "cxl"), "--tier cxl: expected NAME=NODES:CAPACITY"),
        (("--tier", "attic=2"), "--tier attic: tiers are"),
        (("--tier", "cxl=77"), "--tier cxl: node 77 has no memory"),
        (("--tier", "cxl=2:64B"), "tier cxl: "),
        (("--tier", "cxl=2:1GiB", "--limit", "cxl=1GiB"), "--tier gives it a size too"),
        (("--stop", "256"), "stop 256: tokens of this model are 0 to 255"),
        (("--stop", "-1"), "stop -1: tokens of this model are 0 to 255"),
        (("--tune", "step_time"), "give a policy of weights"),
        (("--tune", "luck"), "tune='luck'; known is 'step_time' or 'phase_time'"),
        (("--tune-budget", "1MiB"), "without tune"),
        (("--tune-budget", "much"), "--tune-budget: "),
        (("--tune", "step_time", "--trace", "run.json"), "weights that stay; leave it or tune out"),
        (("--tune", "step_time", "--place", "weights=replicate:0,1"), "copies do not move"),
        (("--warmup", "--persist", "chat"), "leave warmup or persist out"),
    ],
)
def test_options_that_cannot_be_so_are_one_line_before_the_model_loads(
    more: tuple[str, ...],
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generation, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    assert run(command(folder, *KV, "--gen-len", "2", *more)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_both_commands_say_the_same_of_an_option() -> None:
    """One text: in the help of each."""
    pytest.importorskip("flexgen")
    from cxl_offload.integrations.flexgen.options import build_parser

    of_flexgen = {flag: each for each in build_parser("x")._actions for flag in each.option_strings}
    generate = get_command(app).commands["generate"]  # type: ignore[attr-defined]
    of_generate = {flag: each for each in generate.params for flag in each.opts}
    options = [each for each in vars(run_options).values() if hasattr(each, "sentence")]
    shared = [each for each in options if isinstance(each, run_options.RunOption)]
    assert len(shared) == 6
    for option in shared:
        assert of_flexgen[option.flag].help == option.help
        assert option.sentence in of_generate[option.flag].help
    assert "--tune-state" in CliRunner().invoke(app, ["generate", "--help"]).output
