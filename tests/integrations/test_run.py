"""``cxl-offload run`` of a program: real child processes, and a stand-in for a framework."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cxl_offload.cli.main import main
from cxl_offload.cli.run import launch_environment

from .run_command import ROOT, SCRIPT, run, stand_in

AUTOSTART = ROOT / "cxl_offload" / "integrations" / "autostart" / "sitecustomize.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stand_in(tmp_path)


def test_script_starts_the_adapter_once_when_the_framework_is_there(folder: Path) -> None:
    done = run("--plan", "exp_avg=bind:0", "--", sys.executable, "train.py", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before",
        "plan exp_avg=bind:0 engine loaded",
        "after ops SourceFileLoader",
    ]
    assert "nothing was placed" not in done.stderr


def test_plan_is_that_of_the_environment_or_the_defaults(folder: Path) -> None:
    command = ("--", sys.executable, "train.py")
    assert "plan  engine" in run(*command, folder=folder).stdout
    given = run(*command, folder=folder, CXL_OFFLOAD_PLAN="bind:0")
    assert "plan bind:0 engine" in given.stdout


def test_options_of_the_program_are_its_own(folder: Path) -> None:
    (folder / "echo.py").write_text("import sys, json; print(json.dumps(sys.argv[1:]))")
    words = ["--plan", "x", "--dry-run", "--help", "-v", "--", "y"]
    done = run("--", sys.executable, "echo.py", *words, folder=folder)
    assert json.loads(done.stdout) == words
    without = run(sys.executable, "echo.py", *words, folder=folder)
    assert json.loads(without.stdout) == words


def test_program_that_imports_no_framework_is_warned_of(folder: Path) -> None:
    done = run("--", sys.executable, "-c", "print('fine')", folder=folder)
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert "nothing was placed" in done.stderr


def test_framework_that_is_imported_and_places_nothing_is_warned_of(folder: Path) -> None:
    done = run("--", sys.executable, "train.py", "--no-engine", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "engine loaded" in done.stdout
    assert "nothing was placed: no process on this machine trained" in done.stderr


def test_sitecustomize_of_others_still_runs_and_is_the_one_in_sight(folder: Path) -> None:
    other = folder / "frameworks" / "sitecustomize.py"
    other.write_text("import os; SEEN = 'other'; os.environ['OTHER'] = 'ran'\n")
    (folder / "look.py").write_text(
        "import os, sitecustomize; print(os.environ['OTHER'], sitecustomize.SEEN)"
    )
    assert run("--", sys.executable, "look.py", folder=folder).stdout == "ran other\n"
    done = run("--", sys.executable, "train.py", folder=folder)
    assert "engine loaded" in done.stdout


@pytest.mark.parametrize("name", ["deepspeed", "ds_report"])
def test_launcher_itself_is_left_alone_and_its_children_are_not(folder: Path, name: str) -> None:
    """It makes no engine; the adapter would open CUDA in it."""
    runner = folder / "frameworks" / "deepspeed" / "launcher"
    runner.mkdir()
    (runner / "runner.py").write_text("main = None\n")
    launcher = folder / name
    launcher.write_text(
        f"#!{sys.executable}\n"
        "import sys, subprocess\n"
        f"sys.path.insert(0, {str(folder / 'frameworks')!r})\n"
        "from deepspeed.launcher.runner import main\n"
        "assert 'cxl_offload' not in sys.modules\n"
        "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))\n"
    )
    launcher.chmod(0o755)
    done = run("--", str(launcher), "train.py", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("engine loaded") == 1


@pytest.mark.parametrize("name", ["ds", "deepspeed"])
def test_script_that_is_only_named_like_a_launcher_is_placed(folder: Path, name: str) -> None:
    (folder / name).write_text(SCRIPT)
    done = run("--", sys.executable, name, folder=folder)
    assert "engine loaded" in done.stdout
    assert "nothing was placed" not in done.stderr


def test_python_without_this_package_says_so_instead_of_running_unplaced(folder: Path) -> None:
    (folder / "bare.py").write_text("import deepspeed\nprint('ran')\n")
    env = {**os.environ, "PYTHONPATH": f"{AUTOSTART.parent}:{folder / 'frameworks'}"}
    env["CXL_OFFLOAD_PLAN"] = ""
    blocked = folder / "frameworks" / "cxl_offload.py"
    blocked.write_text("raise ModuleNotFoundError('no', name='cxl_offload')\n")
    done = subprocess.run(
        [sys.executable, "bare.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ran" not in done.stdout
    assert "would run without placement; install cxl_offload there" in done.stderr


def test_exit_status_and_signals_are_passed_on(folder: Path) -> None:
    assert run("--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run("--", sys.executable, "-c", killed).returncode == 128 + signal.SIGKILL
    sleeper = "import time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-m", "cxl_offload.cli.main", "run", "--", sys.executable, "-c", sleeper],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    start = time.monotonic()
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert time.monotonic() - start < 30
    process.stdout.close()


@pytest.mark.parametrize(
    ("name", "why"), [("./text", "may not be executed"), ("./folder", "is a folder, not a program")]
)
def test_what_is_there_and_is_no_program_is_named_so(name: str, why: str, folder: Path) -> None:
    (folder / "text").write_text("x")
    (folder / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "cxl_offload", "run", "--", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"cxl-offload: error: {name}: {why}")


def test_program_that_is_not_there_is_one_line() -> None:
    done = run("--", "no-such-program-here")
    assert done.returncode == 2
    assert done.stderr == (
        "cxl-offload: error: no-such-program-here: no such program on the PATH\n"
    )


def test_dry_run_prints_the_command() -> None:
    done = run("--plan", "bind:0", "--dry-run", "--", "deepspeed", "train.py", "--zero", "2")
    assert (done.returncode, done.stdout) == (
        0,
        "CXL_OFFLOAD_PLAN=bind:0 deepspeed train.py --zero 2\n",
    )


def test_places_are_the_policies_of_the_environment_and_not_beside_a_plan() -> None:
    places = ("--place", "exp_avg=bind:0", "--place", "exp_avg_sq=first-touch")
    done = run(*places, "--dry-run", "--", "deepspeed", "train.py")
    assert (done.returncode, done.stdout) == (
        0,
        "CXL_OFFLOAD_PLAN='exp_avg=bind:0;exp_avg_sq=first-touch' deepspeed train.py\n",
    )
    unknown = run("--place", "exp_avg=cxl", "--", "deepspeed", "train.py")
    assert unknown.returncode != 0
    assert "run: exp_avg=cxl: 'cxl' is neither a node id nor a tier" in unknown.stderr
    both = run("--plan", "bind:0", *places, "--", "deepspeed", "train.py")
    assert both.returncode != 0
    assert "--place exp_avg=bind:0: --plan says where tensors go" in both.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--place", "exp_avg=cxl", "p.yaml"], "--place exp_avg=cxl: p.yaml is a plan, which says"),
        (["--plan", "bind:0", "p.yaml"], "--plan bind:0: p.yaml is a plan, which says"),
        (["--plan", "", "p.yml"], "--plan : p.yml is a plan, which says"),
        (["p.yaml", "--report", "p.html"], "--report: p.yaml is a plan, which runs its own"),
        (
            ["--report", "p.html", "--dry-run", "--", "python", "train.py"],
            "--report p.html: --dry-run runs nothing to report",
        ),
    ],
)
def test_option_that_would_change_nothing_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_program_whose_name_ends_like_a_plan_is_placed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    book = folder / "book.yml"
    book.write_text('#!/bin/sh\necho "$1 at $CXL_OFFLOAD_PLAN"\n')
    book.chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--plan", "bind:0", "--", str(book), "--tags"])
    assert ended.value.code == 0
    assert capfd.readouterr().out == "--tags at bind:0\n"


def test_dry_run_shows_what_the_environment_says_of_metrics_and_events(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "events.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["run", "--metrics", "9400", "--events", str(file), "--dry-run", "--", "torchrun"])
    assert ended.value.code == 0
    said = f"CXL_OFFLOAD_PLAN='' CXL_OFFLOAD_METRICS=9400 CXL_OFFLOAD_EVENTS={file} torchrun\n"
    assert capsys.readouterr().out == said


def test_environment_finds_the_package_of_a_source_tree_and_keeps_the_path() -> None:
    made = launch_environment("bind:0", {"PYTHONPATH": "/mine", "HOME": "/h"}, "/marks")
    assert made["PYTHONPATH"].split(os.pathsep) == [str(AUTOSTART.parent), "/mine", str(ROOT)]
    assert (made["HOME"], made["CXL_OFFLOAD_RUN"]) == ("/h", "/marks")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("exp_avg=bnd:0", "'bnd:0'"),
        ("exp_avg=bind:0;kv=bind:0", "no kind kv in ZeRO-Offload"),
        ("bind:77", "77"),
        ("", "--plan '': is no plan and no policy"),
        (" ", "--plan ' ': is no plan and no policy"),
    ],
)
def test_plan_that_no_child_could_follow_is_refused_before_it_starts(
    plan: str, says: str, folder: Path
) -> None:
    script = "open('started', 'w')"
    done = run("--plan", plan, "--", sys.executable, "-c", script, folder=folder)
    assert (done.returncode, done.stdout, (folder / "started").exists()) == (2, "", False)
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_policies_for_other_machines_are_not_looked_up_on_this_one() -> None:
    words = ["--plan", "bind:77", "--dry-run", "--", "deepspeed", "--hostfile=hosts", "train.py"]
    assert run(*words).stdout == "CXL_OFFLOAD_PLAN=bind:77 deepspeed --hostfile=hosts train.py\n"
