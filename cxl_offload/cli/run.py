"""``cxl-offload run``: an unmodified program with its tensors placed, or the command of a plan."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import cxl_offload
from cxl_offload.cli._advice import warn_of_advice
from cxl_offload.cli._child import wait_for
from cxl_offload.cli._observed import Events, Metrics
from cxl_offload.cli._options import AsJson
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._report_file import ReportFile
from cxl_offload.cli._run_marks import read_marks, write_marked_page
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs
from cxl_offload.plan.environment import PLAN_VARIABLE

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan

_MARKS = "CXL_OFFLOAD_RUN"
_PACKAGE = Path(cxl_offload.__file__).resolve().parent
_AUTOSTART = _PACKAGE / "integrations" / "autostart"
_PROGRAM = "cxl_offload"
_STDERR = 2
_FILES = (".yaml", ".yml")
_STARTERS = ("srun", "mpirun", "mpiexec", "ssh", "pdsh")
_HOSTS = {"-H", "--hostfile", "--num_nodes", "--nnodes"}
"""Options of the launchers of DeepSpeed and torch that name other machines."""


PlaceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=POLICY",
        help="Where one kind of tensor goes, e.g. exp_avg=bind:cxl, where no plan says it; may be "
        "repeated.",
    ),
]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command and do not run it.")]


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    # Everything behind the first word is the program's, its options too.
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    words: Annotated[
        list[str], typer.Argument(metavar="PLAN | -- COMMAND...", help="What to run.")
    ],
    plan: Annotated[
        str | None,
        typer.Option(
            help="A plan of `cxl-offload plan training`, KIND=POLICY;KIND=POLICY, or one policy; "
            "by default CXL_OFFLOAD_PLAN, else the defaults."
        ),
    ] = None,
    place: PlaceOption = None,
    dry_run: DryRun = False,
    page: ReportFile = None,
    metrics: Metrics = None,
    events: Events = None,
    as_json: AsJson = False,
) -> None:
    """Run a training script with its offloaded tensors placed, or what a plan says.

    `cxl-offload run --plan plan.yaml -- deepspeed train.py ...` starts the script as it is (also
    with python or torchrun); `cxl-offload run plan.yaml` runs the command of a plan. With
    --metrics every process serves at the port plus its local rank. With --json the script's own
    output goes to stderr.

    Example: cxl-offload run --plan plan.yaml -- deepspeed train.py
    """
    read = {"--plan": plan or None, "PLAN": words[0] if words[0].endswith(_FILES) else None}
    check_outputs({"--report": page, "--events": events}, read)
    plan = _asked(plan, place, words)
    base = {**os.environ, **(watched := _watched(metrics, events))}
    text = os.environ.get(PLAN_VARIABLE, "") if plan is None else plan
    with tempfile.TemporaryDirectory(prefix="cxl-offload-run-") as folder:
        (marks := Path(folder, "placed")).mkdir()
        if plan is None and words[0].endswith(_FILES) and words[1:] == ["--dry-run"]:
            words, dry_run = words[:1], True  # behind a plan there is no program to give it to
        if is_plan := plan is None and len(words) == 1 and words[0].endswith(_FILES):
            found = _read(text := words[0])
            words = plan_command(found, text, None if dry_run else Path(folder))
            if found.executor != "deepspeed":
                words += _reported(found.executor, words, page, as_json and not dry_run, watched)
                base[PLAN_VARIABLE] = str(Path(text).resolve())
                _finish(_shown(words, base, as_json) if dry_run else _run(words, base))
        # A plan by itself may be for another machine: its command is printed or fails there.
        text = _checked(text, elsewhere=is_plan or runs_elsewhere(words))
        environment = launch_environment(text, base, str(marks))
        if dry_run:
            _finish(_shown(words, environment, as_json, page))
        _finish(_run_and_tell(words, environment, marks, page, as_json))


def _run_and_tell(
    words: Sequence[str], environment: Mapping[str, str], marks: Path, page: Path | None, json: bool
) -> int:
    """Runs a script, says what its processes placed, and warns where they placed nothing."""
    began = time.monotonic()
    code = _run(words, environment, stdout=_STDERR if json else None)
    seconds = time.monotonic() - began
    if page is not None:  # before what is printed, whose reader may stop early
        write_marked_page(page, shlex.join(words), marks, seconds=seconds, code=code)
    if json:
        facts = {"command": list(words), "status": code, "seconds": seconds}
        write_json("-", {**facts, "processes": read_marks(marks)})
    if code == 0 and not os.listdir(marks):
        typer.echo(
            "cxl-offload: warning: nothing was placed: no process on this machine trained with "
            "a DeepSpeed engine that offloads (with -S, -E or -I Python does not load the "
            "autostart)",
            err=True,
        )
    return code


def _watched(metrics: str | None, events: str | None) -> dict[str, str]:
    """What the program's environment says of metrics and events."""
    from cxl_offload.metrics.environment import METRICS_VARIABLE, read_address
    from cxl_offload.metrics.event_log import EVENTS_VARIABLE, check_events_file

    made = {}
    if metrics is not None:
        read_address(metrics)
        made[METRICS_VARIABLE] = metrics
    if events is not None:
        check_events_file(events)
        made[EVENTS_VARIABLE] = str(Path(events).resolve())
    return made


def _reported(
    executor: str,
    words: Sequence[str],
    page: Path | None,
    as_json: bool,
    watched: Mapping[str, str],
) -> list[str]:
    """The options with which the command of a plan reports what it did itself.

    ``watched`` is what its environment says of metrics and events. What this process's own said
    is for other commands too, and is not refused.
    """
    given = [] if page is None else ["--report", str(page)]
    given += ["--json"] if as_json else []
    if words[1:3] == ["-m", _PROGRAM]:
        return given
    here = {name: os.environ.get(name, "") for name in watched}
    own = {name: (value, str(Path(value).resolve())) for name, value in here.items()}
    unread = [name for name, value in watched.items() if value not in own[name]]
    refused = given[:1] + [f"--{name.rpartition('_')[2].lower()}" for name in unread]
    if not refused:
        return []
    raise ConfigError(
        f"{refused[0]}: a plan for {executor} runs a program of others, which does not know it"
        + ("; cxl-offload vllm-report reads its metrics" if executor == "vllm" else "")
    )


def _asked(plan: str | None, place: list[str] | None, words: Sequence[str]) -> str | None:
    """What is to be placed: a plan, or the policies of kinds."""
    if words[0].endswith(_FILES) and shutil.which(words[0]) is None:  # no program of that name
        given = f"--plan {plan}" if plan is not None else f"--place {place[0]}" if place else ""
        if given:
            raise ConfigError(
                f"{given}: {words[0]} is a plan, which says where tensors go; leave one out, or "
                "name a program to run"
            )
        if words[1:] not in ([], ["--dry-run"]):
            raise ConfigError(
                f"{words[1]}: {words[0]} is a plan, which runs its own command; an option goes "
                "before it"
            )
    if plan is not None and not plan.strip():
        raise ConfigError(
            f"--plan {plan!r}: is no plan and no policy; leave it out for the defaults"
        )
    if not place:
        return plan
    if plan is not None:
        raise ConfigError(f"--place {place[0]}: --plan says where tensors go; give one of the two")
    policies = pairs("--place", place, str, form="KIND=POLICY, such as exp_avg=bind:cxl")
    return ";".join(f"{kind}={policy}" for kind, policy in policies.items())


def launch_environment(text: str, base: Mapping[str, str], marks: str = "") -> dict[str, str]:
    """The environment of a program whose processes place their tensors by themselves.

    Parameters
    ----------
    text
        What ``CXL_OFFLOAD_PLAN`` shall say.
    base
        The environment to start from.
    marks
        A folder where every process that has placed something leaves a file.
    """
    path = [str(_AUTOSTART), *filter(None, [base.get("PYTHONPATH")])]
    if _PACKAGE.parent.name not in ("site-packages", "dist-packages"):
        path.append(str(_PACKAGE.parent))  # a source tree; an installed package is found anyway
    made = {**base, "PYTHONPATH": os.pathsep.join(path), PLAN_VARIABLE: text}
    return {**made, _MARKS: marks} if marks else made


def plan_command(plan: Plan, path: str, folder: Path | None) -> list[str]:
    """The command that a plan names, ready to be run.

    Parameters
    ----------
    path
        The plan's own.
    folder
        Where its settings are written to, for the command to read; None writes nothing, and the
        command names them as the plan does.

    Raises
    ------
    ConfigError
        The plan is advice only, or its program is not installed.
    """
    if not plan.runs:
        raise ConfigError(f"{path} is advice only: {plan.advice}")
    command = list(plan.command_in(path))
    if folder is not None:
        for name, setting in plan.settings.items():
            (folder / name).write_text(setting + "\n", encoding="utf-8")
        command = [str(folder / word) if word in plan.settings else word for word in command]
    if command[:1] == ["cxl-offload"]:
        return [sys.executable, "-m", _PROGRAM, *command[1:]]
    programs = [word for word in command if word in ("numactl", "vllm")]
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(
                f"{program} is not installed here; where it is, run: {shlex.join(command)}"
            )
    return command


def _read(path: str) -> Plan:
    from cxl_offload.plan.plan_file import load_plan

    return load_plan(path)


def runs_elsewhere(command: Sequence[str]) -> bool:
    """Whether a command starts processes on other machines, whose nodes are not known here."""
    options = {word.partition("=")[0] for word in command}
    return Path(command[0]).name in _STARTERS or bool(options & _HOSTS)


def _checked(text: str, *, elsewhere: bool) -> str:
    """The setting for the child: a file by its whole path, and it must be a plan for training.

    What would be refused in the child, after its model was made, is refused now. Places of a plan
    that is advice only are taken with a warning: the command is the caller's own.
    """
    is_file = text.endswith(_FILES) or os.path.exists(text)
    if is_file:
        plan = _read(text)
        if plan.executor != "deepspeed":
            raise ConfigError(
                f"{text} is a plan for {plan.executor} and cannot place a training script; "
                f"run it by itself: cxl-offload run {shlex.quote(text)}"
            )
        warn_of_advice(plan, text, "its places are")
    if not elsewhere:
        _check_policies(text)
    return str(Path(text).resolve()) if is_file else text


def _check_policies(text: str) -> None:
    from cxl_offload.integrations.deepspeed.kinds import kind_policies
    from cxl_offload.memory import known_policy
    from cxl_offload.topology import discover

    machine = discover()
    try:
        for policy in kind_policies(text.strip() or None, machine).by_kind.values():
            known_policy(policy, machine)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"run: {text}: {error}") from None


def _shown(
    command: Sequence[str],
    environment: Mapping[str, str],
    as_json: bool,
    page: Path | None = None,
) -> int:
    """Prints what would be run; ``page`` would be written behind it, and cannot be."""
    if page is not None:
        raise ConfigError(f"--report {page}: --dry-run runs nothing to report; leave one out")
    from cxl_offload.metrics.environment import METRICS_VARIABLE
    from cxl_offload.metrics.event_log import EVENTS_VARIABLE

    names = (PLAN_VARIABLE, METRICS_VARIABLE, EVENTS_VARIABLE)
    own = {name: environment[name] for name in names if name in environment}
    if as_json:
        write_json("-", {"command": list(command), "environment": own})
    else:
        settings = [f"{name}={shlex.quote(value)}" for name, value in own.items()]
        typer.echo(" ".join([*settings, shlex.join(command)]))
    return 0


def _why_no_program(name: str) -> str:
    """What is wrong with the name of a program that cannot be started."""
    if "/" in name and Path(name).is_dir():
        return "is a folder, not a program"
    if "/" in name and Path(name).exists():
        return "may not be executed; name the program that runs it, such as python, or use chmod +x"
    return "no such " + ("file" if "/" in name or Path(name).suffix else "program on the PATH")


def _run(
    command: Sequence[str], environment: Mapping[str, str], *, stdout: int | None = None
) -> int:
    """The program's exit status; it gets the signals that would end this one.

    ``stdout`` is where its output goes, as ``subprocess`` has it.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ConfigError(f"{command[0]}: {_why_no_program(command[0])}")
    child = subprocess.Popen(command, env=dict(environment), stdout=stdout)
    code = wait_for(child)
    return 128 - code if code < 0 else code


def _finish(code: int) -> None:
    raise typer.Exit(code)
