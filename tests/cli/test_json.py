"""``--json`` is one thing in every command: it prints JSON, and nothing else, on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cxl_offload.cli._old_json import in_new_form
from cxl_offload.cli.main import app
from cxl_offload.plan.plan_file import load_plan, save_plan
from cxl_offload.profile.store import parse_profile

from ..profile.test_profile import profile_of

PLAN = ["plan", "inference", "--model", "opt-1.3b", "--machine", "epyc9354-cxl-a"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in group.commands.items():
        inner = f"{path} {name}".strip()
        if hasattr(each, "commands"):
            yield from commands(each, inner)
        else:
            yield inner, each


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"flexgen"}))
def test_every_command_has_json_as_a_flag(name: str) -> None:
    found = [each for each in COMMANDS[name].params if "--json" in each.opts]
    assert [(each.is_flag, each.default) for each in found] == [(True, False)]


def test_flexgen_has_json_as_a_flag() -> None:
    options = pytest.importorskip("cxl_offload.integrations.flexgen.options")
    parsed = options.parse_flags("flexgen", ["--model", "m", "--json", "--output", "r.json"])
    assert (parsed.json, parsed.output) == (True, "r.json")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (["--json", "r.json", "--x"], ["--output", "r.json", "--x"], "--json r.json is now --out"),
        (["--json=r.json"], ["--output", "r.json"], "--json r.json is now --output r.json"),
        (["--a", "1", "--json", "-"], ["--a", "1", "--json"], "--json - is now --json;"),
        (["--json"], ["--json"], ""),
        (["--json", "--trace", "t"], ["--json", "--trace", "t"], ""),
    ],
)
def test_old_form_with_a_file_is_read_with_a_warning(
    old: list[str], new: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_new_form("generate", old) == new
    warned = capsys.readouterr().err
    assert said in warned
    assert bool(warned) is bool(said)


def test_generate_takes_the_old_form() -> None:
    made = run("generate", "--model", "m", "--prompts", "p", "--json", "/nosuch/report.json")
    warning, error = made.stderr.splitlines()
    assert "generate: --json /nosuch/report.json is now --output /nosuch/report.json" in warning
    assert "--output /nosuch/report.json: there is no folder" in error
    refused = run("generate", "--model", "m", "--prompts", "p", "--output", "-")
    assert "--output -: it names a file; --json prints" in refused.stderr


def test_run_prints_what_it_ran_and_the_script_writes_to_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = run("run", "--json", "--", sys.executable, "-c", "print('of the script'); exit(3)")
    assert made.exit_code == 3
    document = json.loads(made.stdout)
    assert document["command"][0] == sys.executable
    assert (document["status"], document["processes"], document["version"]) == (3, [], 1)
    shown = capfd.readouterr()
    assert "of the script" in shown.err
    assert "of the script" not in shown.out


def test_run_of_a_plan_hands_json_on_or_refuses_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "plan.yaml")
    assert run(*PLAN, "--executor", "vllm", "--output", file).exit_code == 0
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        refused = run("run", "--json", file)
        dry = json.loads(run("run", "--json", "--dry-run", file).stdout)
    assert dry["command"][:2] == ["vllm", "serve"]
    assert list(dry["environment"]) == ["CXL_OFFLOAD_PLAN"]
    assert "--json: a plan for vllm runs a program of others" in refused.stderr
    ours = replace(load_plan(file), executor="flexgen", command=("cxl-offload", "env"))
    save_plan(ours, file)
    assert run("run", "--json", file).exit_code == 0
    assert "versions" in json.loads(capfd.readouterr().out), "as `env --json` prints it"


def test_report_prints_what_its_page_shows(tmp_path: Path) -> None:
    plan, page = str(tmp_path / "plan.yaml"), str(tmp_path / "page.html")
    assert run(*PLAN, "--output", plan).exit_code == 0
    made = run("report", page, "--machine", "epyc9354-cxl-a", "--plan", plan, "--json")
    found = json.loads(made.stdout)
    assert (found["page"], found["findings"], found["profile"]) == (page, [], None)
    assert found["machine"] == json.loads(
        run("topology", "--machine", "epyc9354-cxl-a", "--json").stdout
    )
    assert found["plan"] == json.loads(run("plan", "show", plan, "--json").stdout)
    assert Path(page).read_text().startswith("<!doctype html>")


def test_profile_prints_what_it_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = profile_of(())
    monkeypatch.setattr("cxl_offload.profile.measure_machine", lambda *_, **__: found)
    file = tmp_path / "profile.json"
    made = run("profile", "--json", "--output", str(file))
    assert made.exit_code == 0, made.stderr
    assert parse_profile(made.stdout, file="stdout") == found
    assert file.read_text() == made.stdout
    assert f"written: {file}" in made.stderr
    assert "a processor, 2 CPUs" in run("profile").stdout
