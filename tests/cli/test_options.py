"""Options that every command has, and those that do not apply: they are refused, not ignored."""

from __future__ import annotations

import inspect
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.topology import load_machine

PLAN = ["plan", "inference", "--model", "opt-30b", "--machine", "epyc9354-cxl-a"]
MOST = ["--executor", "transformers", "--max-batches", "1"]
TRAINING = ["plan", "training", "--model", "opt-1.3b", "--machine", "epyc9354-cxl-a"]


def run(*arguments: str) -> tuple[int, str, str]:
    made = CliRunner().invoke(app, arguments)
    return made.exit_code, made.stdout, made.stderr


def test_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cxl_offload", "topology", "--machine", "no-such-machine"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("cxl-offload: error: ")
    assert "no-such-machine" in line


@pytest.mark.parametrize("command", [[], ["plan"], ["plan", "inference"], ["doctor"], ["run"]])
def test_short_help_is_the_long_one(command: list[str]) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short == long
    assert short[0] == 0
    assert "Usage" in short[1]


@pytest.mark.parametrize(
    ("executor", "option", "value"),
    [
        ("vllm", "--max-batches", "4"),
        ("vllm", "--interleave", "kv=auto"),
        ("vllm", "--path", "weights"),
        ("flexgen", "--kv-host", "1GiB"),
        ("flexgen", "--sockets", "2"),
        ("vllm", "--sockets", "2"),
    ],
)
def test_option_of_the_other_executor_is_refused(executor: str, option: str, value: str) -> None:
    code, _, error = run(*PLAN, "--executor", executor, option, value)
    assert code == 2
    assert f"{option}: {executor} has no such option" in error


@pytest.mark.parametrize(
    ("machine", "why", "alone"),
    [
        (
            ["--machine", "spr-1"],
            "spr-1 has no GPU",
            "no GPU, or none is asked for; name one that has",
        ),
        (
            ["--machine", "epyc9354-cxl-a", "--gpu", "none"],
            "--gpu none plans without one",
            "GPUs are left out (--gpu none); leave that out, or name a GPU",
        ),
    ],
)
def test_share_of_a_gpu_that_is_not_there_is_refused(
    machine: list[str], why: str, alone: str
) -> None:
    asked = ["plan", "inference", "--model", "opt-125m", *machine, "--executor", "transformers"]
    assert run(*asked)[0] == 0
    code, out, error = run(*asked, "--gpu-usable", "0.5")
    assert (code, out) == (2, "")
    assert f"--gpu-usable 0.5: {why}; leave it out" in error
    _, _, error = run(*asked[:-1], "flexgen", "--gpu-usable", "0.5")
    assert alone in error, "it plans for nothing else"


def test_picture_that_was_not_drawn_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cxl_offload.plan.training.plan as training

    def nothing(request: training.TrainingRequest) -> None:
        """A plan whose replay was refused never calls the simulator."""

    monkeypatch.setattr(training, "plan_training", nothing)
    picture = tmp_path / "step.png"
    code, _, error = run(*TRAINING, "--timeline", str(picture))
    assert (code, picture.exists()) == (2, False)
    assert "nothing was drawn" in error


def test_picture_of_an_unknown_format_is_refused_by_the_name_of_its_option(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wrong, right = str(tmp_path / "step.xyz"), str(tmp_path / "step.SVG")
    for command in ([*TRAINING, "--timeline"], ["validate", "--plot"]):
        code, out, error = run(*command, wrong)
        assert (code, out) == (2, "")
        option = command[-1]
        assert f"{option} {wrong}: no picture is written as .xyz; end its name in .png" in error
    assert run(*TRAINING, "--timeline", right)[0] == 0
    assert Path(right).read_text(encoding="utf-8").startswith("<?xml")


def test_help_names_every_executor_that_takes_an_option() -> None:
    """Panels of the help are of those executors that do not refuse what is in them."""
    text = run("plan", "inference", "--help")[1]
    panel = text[text.index("FlexGen only") :].partition("─╯")[0]
    assert "--interleave" in panel
    assert "--max-batches" not in panel
    assert run(*PLAN[:3], "opt-125m", *PLAN[4:], *MOST)[0] == 0


def test_picture_without_matplotlib_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxl_offload.cli._report_table.find_spec", lambda name: None)
    for command in (
        [*TRAINING, "--timeline", "a.png"],
        ["profile", "--plot", str(tmp_path)],
        ["validate", "--plot", str(tmp_path / "a.png")],
    ):
        code, _, error = run(*command)
        assert code == 2
        assert "needs matplotlib; install it, e.g. pip install matplotlib" in error


def test_verdict_of_a_plan_comes_before_its_tables(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    code, out, _ = run(*TRAINING, "--output", str(file))
    assert code == 0
    lines = out.splitlines()
    assert next(i for i, line in enumerate(lines) if line.startswith("CXL memory:")) <= 3
    assert "0 + " not in lines[1]


def test_dry_run_behind_a_plan_prints_a_command_without_folders_that_are_gone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.yaml"
    assert run(*TRAINING, "--output", str(file))[0] == 0
    behind, before = run("run", str(file), "--dry-run"), run("run", "--dry-run", str(file))
    assert behind == before
    code, out, _ = behind
    assert code == 0
    assert "cxl-offload-run-" not in out
    assert " ds_config.json" in out


def test_shell_completes_the_subcommands() -> None:
    asked = {"_CXL_OFFLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "cxl-offload top"}
    done = subprocess.run(
        [sys.executable, "-m", "cxl_offload.cli.main"],
        env={**os.environ, **asked, "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["topology"]


def test_objects_say_the_version_of_their_json() -> None:
    machine = ["--machine", "epyc9354-cxl-a", "--json"]
    _, out, _ = run("plan", "objects", *machine, "--object", "kv=60GiB")
    made = json.loads(out)
    assert made["version"] == 1
    assert [each["name"] for each in made["objects"]] == ["kv"]


def test_latency_that_nobody_published_is_called_estimated() -> None:
    _, out, _ = run("plan", "inference", "--machine", "epyc9354-cxl-a", "--model", "opt-1.3b")
    assert "has no latency of rdram; estimated 215.5 ns" in " ".join(out.split())


def test_help_groups_options_and_gives_flags_no_type() -> None:
    status, out, _ = run("plan", "inference", "--help")
    assert status == 0
    for heading in ("Machine", "What may be used", "FlexGen only", "vLLM only", "Results"):
        assert f"─ {heading} ─" in out
    assert "<bool>" not in out
    assert "<bool>" not in run("topology", "--help")[1]


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["env"],
        ["validate"],
        ["plan", "objects", "--machine", "epyc9354-cxl-a", "--object", "kv=1GiB"],
        ["tco", "--rl-d", "0.2", "--rl-c", "0.5", "--c", "2", "--r-t", "1.1"],
    ],
)
def test_json_of_a_report_has_a_version(command: list[str]) -> None:
    code, text, error = run(*command, "--json")
    assert (code, error) == (0, "")
    assert json.loads(text)["version"] == 1


def test_environment_names_versions_limits_nodes_and_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "who"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CXL_OFFLOAD_COPY_RULES", str(tmp_path / "who" / "rules"))
    monkeypatch.setenv("CXL_OFFLOAD_TESTS_UNTIL", "a value wider than the others of its column")
    monkeypatch.setenv("SECRET_TOKEN", "never shown")
    code, text, _ = run("env")
    assert code == 0
    lines = {line.split("  ")[0]: line.rstrip() for line in text.splitlines() if line}
    assert platform.python_version() in lines["Python"]
    assert "3" in lines["OMP_NUM_THREADS"]
    assert lines["CXL_OFFLOAD_COPY_RULES"].endswith("~/rules")
    assert {"instruction sets", "open files", "Nodes; tiers as seen from node 0"} <= {*lines}
    assert "never shown" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("name", "shown"), [("epyc9354-cxl-a", "A10"), ("spr-1", "none")])
def test_environment_names_the_gpus_or_says_that_there_are_none(
    name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_machine(name)
    assert bool(machine.gpus) == (shown != "none")
    monkeypatch.setattr("cxl_offload.cli.env.discover", lambda: machine)
    (line,) = [each for each in run("env")[1].splitlines() if each.startswith("GPUs ")]
    assert line.split()[1] == shown


def test_margin_that_is_a_percentage_is_refused() -> None:
    code, _, error = run(*PLAN, "--cxl-margin", "3")
    assert code == 2
    assert "Invalid value for '--cxl-margin'" in error


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every subcommand that does something, by the words that name it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, each in below.items():
        yield from leaves(each, (*path, name))


SUBCOMMANDS = dict(leaves(typer.main.get_command(app)))


def test_walk_finds_the_subcommands_of_groups_too() -> None:
    assert {("plan", "fleet"), ("kv", "verify"), ("doctor",), ("flexgen",)} <= {*SUBCOMMANDS}


@pytest.mark.parametrize("path", SUBCOMMANDS, ids=" ".join)
def test_help_of_every_subcommand_has_an_example_whose_options_exist(path: tuple[str, ...]) -> None:
    command = SUBCOMMANDS[path]
    text = " ".join(inspect.cleandoc(command.help).split())
    assert "Example: cxl-offload " in text
    words = shlex.split(text.partition("Example: ")[2].partition(". ")[0])
    assert tuple(words[1 : 1 + len(path)]) == path
    if path == ("flexgen",):  # its options are those of FlexGen's parser
        return
    own = words[: words.index("--")] if "--" in words else words
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in own if word.startswith("--")} <= known


def test_exit_statuses_are_in_the_help() -> None:
    text = " ".join(run("--help")[1].split())
    assert "Exit status: 0 done; 1 a check found something" in text
    assert "2 an error" in text
    assert "<bool>" not in text


def test_ctrl_c_is_one_line_and_its_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cxl_offload.cli.topology.discover", interrupted)
    assert run("topology") == (130, "", "\ncxl-offload: stopped by Ctrl-C\n")


EARLY = [
    ("no such folder", "generate --model no --prompts p.txt --place kv=0"),
    (
        "--prompts no.txt: there is no such file; write it, with one prompt a line",
        "generate --model my --prompts no.txt --place kv=0",
    ),
    ("no.yaml", "generate --model my --prompts p.txt --plan no.yaml"),
    ("model my-opt: no such folder", "flexgen --model my-opt"),
    ("model folder /no/where does not exist", "flexgen --model=/no/where"),
    ("--prompts no.txt", "flexgen --model opt-1.3b --prompts no.txt"),
    ("no.yaml", "flexgen --plan no.yaml --model my"),
    ("no", "flexgen --model my --machine no"),
    ("kind 'wieghts': kinds are kv,", "generate --model my --prompts p.txt --place wieghts=0"),
    ("--place wieghts=0: expected KIND", "flexgen --model my --place kv=0 --place=wieghts=0"),
]

WITHOUT_TORCH = """
import contextlib, io, json, sys
sys.modules["torch"] = None  # whoever imports it finds that it is missing
from cxl_offload.cli.main import main
told = []
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(
        io.StringIO()
    ) as err:
        try:
            main(words.split())
        except SystemExit as ended:
            told.append([ended.code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""


def test_what_needs_no_torch_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """It took as long as loading torch and transformers. One process tries all."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "config.json").write_text("{}")
    (tmp_path / "p.txt").write_text("Errors should\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *(words for _, words in EARLY)],
        env={**os.environ, "PYTHONPATH": root},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for (said, words), (code, out, error) in zip(EARLY, json.loads(done.stdout), strict=True):
        assert (code, out) == (2, ""), words
        assert said in error, words
        assert "not installed" not in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_while_modules_are_loaded_is_one_line(tmp_path: Path, code: str) -> None:
    """The console script's function, with a typer whose loading is interrupted."""
    root = Path(__file__).parents[2]
    script = re.search(r'^cxl-offload = "(.+):(.+)"', (root / "pyproject.toml").read_text(), re.M)
    assert script is not None
    module, function = script.groups()
    (tmp_path / "typer.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import {function}; {function}()"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr.split("\n") == ["", "cxl-offload: stopped by Ctrl-C", ""]
    assert not done.stdout


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_tco_refuses_what_no_number_holds(how: list[str]) -> None:
    words = "tco --rl-d 0.2 --rl-c 0.5 --c 2 --r-t 1.1 --n-baseline 1e308 --server-cost 1e308"
    code, out, error = run(*words.split(), *how)
    assert (code, out) == (2, "")
    assert error.startswith("cxl-offload: error: tco: cost without CXL")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["weights.safetensors", "empty"])
def test_file_that_is_no_model_is_not_said_to_be_missing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    code, _, error = run("plan", "inference", "--model", str(tmp_path / name))
    assert code == 2
    assert "a model's file ends in .json, .yaml or .yml" in error
    assert len(error.splitlines()) == 1
