"""Files that commands write: refused before any work is done, and no answer is lost to them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli import _plan_report
from cxl_offload.cli._outputs import check_outputs, write_all
from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import load_plan

MACHINE = ["--machine", "epyc9354-cxl-a"]
COMMANDS = {
    "plan inference": (["--model", "opt-1.3b", *MACHINE], ("--output", "--report", "--timeline")),
    "plan training": (["--model", "opt-1.3b", *MACHINE], ("--output", "--report", "--timeline")),
    "generate": (
        ["--model", "m", "--prompts", "p"],
        ("--output", "--trace", "--report", "--events"),
    ),
    "profile": ([], ("--output", "--copy-rules", "--report")),
    "doctor": ([], ("--report",)),
    "run": ([], ("--report", "--events")),
    "validate": ([], ("--plot",)),
}
EVERY = [(command, option) for command, (_, options) in COMMANDS.items() for option in options]


def refusal(command: str, *options: str) -> str:
    words = [*command.split(), *COMMANDS[command][0], *options]
    made = CliRunner().invoke(app, [*words, "--", "true"] if command == "run" else words)
    assert made.exit_code == 2, made.output
    assert not made.stdout
    (line,) = made.stderr.splitlines()
    return line


@pytest.fixture
def bad(tmp_path: Path) -> dict[str, str]:
    """What cannot be written, by the reason."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    (tmp_path / "file").write_text("old")
    return {
        str(tmp_path / "no" / "file"): "there is no folder",
        str(tmp_path / "link"): "there is no folder",
        str(tmp_path / "folder"): "is a folder, not a file",
        str(tmp_path / "pipe"): "is a pipe, not a file",
        str(tmp_path / "file" / "file"): "there is no folder",
        str(tmp_path / ("n" * 300)): "File name too long",
        "/dev/nosuch": "cannot be written",
        "/dev/null/x": "cannot be written",
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "option"), EVERY)
def test_every_command_refuses_first_what_it_cannot_write(
    command: str, option: str, bad: dict[str, str]
) -> None:
    for file, reason in bad.items():
        line = refusal(command, option, file)
        assert f"{option} " in line
        assert reason in line


def test_name_that_no_file_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no name of a file"):
        check_outputs({"--trace": "a\0b"})
    with pytest.raises(ConfigError, match="--trace '': the name of the file is empty"):
        check_outputs({"--trace": ""})


@pytest.mark.parametrize("command", [name for name, (_, some) in COMMANDS.items() if some[1:]])
def test_two_outputs_are_two_files(command: str, tmp_path: Path) -> None:
    first, second = COMMANDS[command][1][:2]
    (tmp_path / "link").symlink_to(tmp_path / "file")
    line = refusal(command, first, str(tmp_path / "file"), second, str(tmp_path / "link"))
    assert f"{first} writes the same file; name another" in line


def test_output_never_replaces_what_is_read(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "prompts.txt"):
        (model / name).write_text(name)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        with pytest.raises(ConfigError, match="--model reads this file, which would be replaced"):
            check_outputs({"--trace": model / name}, {"--model": model})
    (tmp_path / "here").symlink_to(model)
    with pytest.raises(ConfigError, match="--prompts reads this file"):
        check_outputs(
            {"--output": tmp_path / "here" / "prompts.txt"}, {"--prompts": model / "prompts.txt"}
        )
    check_outputs({"--output": model / "report.json"}, {"--model": model, "--machine": "gh200"})


def test_what_is_no_file_of_its_own_may_be_named_twice() -> None:
    check_outputs({"--plot": "-", "--trace": "/dev/null", "--report": "/dev/null", "--x": None})


def test_full_drive_is_seen_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(os.statvfs(tmp_path))
    found[4] = 0  # f_bavail: blocks for those who are not root
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found))
    with pytest.raises(ConfigError, match="no space is left in"):
        check_outputs({"--trace": tmp_path / "trace.json"})


def test_file_that_fails_keeps_no_other_from_being_written(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        raise OSError(28, "No space left on device", name)

    with pytest.raises(OSError, match="first"):
        write_all(lambda: fail("first"), lambda: (tmp_path / "a").touch(), lambda: fail("second"))
    assert (tmp_path / "a").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("as_json", [False, True])
def test_plan_is_printed_also_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def full(_: object, file: Path) -> None:
        raise OSError(28, "No space left on device", str(file))

    words = ["plan", "inference", "--model", "opt-1.3b", "--executor", "transformers", *MACHINE]
    file, page = tmp_path / "plan.yaml", tmp_path / "page.html"
    monkeypatch.setattr(_plan_report, "save_plan", full)
    words += ["--output", str(file), "--report", str(page), *(["--json"] if as_json else [])]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 2
    assert f"{file}: No space left on device" in made.stderr
    if as_json:
        assert json.loads(made.stdout)["tokens_per_s"] > 0
    else:
        assert "tokens/s" in made.stdout
    assert page.exists()
    monkeypatch.undo()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert load_plan(file).executor == "transformers"
