"""``cxl-offload flexgen``: FlexGen's own command line, its host memory in tiers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from cxl_offload.cli._generate_report import beside_plan
from cxl_offload.cli._observed import observed
from cxl_offload.cli._old_json import in_new_form
from cxl_offload.cli._outputs import check_outputs, outputs, write_all
from cxl_offload.cli._plan_inputs import profile_notes
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_file import write_run_page
from cxl_offload.cli._report_table import NONE, console_of, show, table
from cxl_offload.cli._run_report import (
    answer_lines,
    load_line,
    placement_table,
    simulated_table,
    speed_table,
    write_json,
)
from cxl_offload.errors import ConfigError
from cxl_offload.units import format_bytes

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cxl_offload.integrations.flexgen import FlexGenReport, FlexGenRun
    from cxl_offload.memory import Session
    from cxl_offload.profile.operators.model import OperatorProfile
    from cxl_offload.sim import Timeline

_PROGRAM = "cxl-offload flexgen"
_FILES = ("--model", "--path", "--prompts", "--plan", "--machine")
_DUMMY = "_DUMMY_"  # of FlexGen, which is not loaded yet


def register(app: typer.Typer) -> None:
    """Add the subcommand; its flags are FlexGen's, so FlexGen's own parser reads them."""
    options = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("flexgen", add_help_option=False, context_settings=options)(flexgen)


def flexgen(context: typer.Context) -> None:
    """Generate with FlexGen: weights, KV cache, activations and workspace in tiers.

    Example: cxl-offload flexgen --model my-opt --prompts prompts.txt --place kv=bind:cxl
    """
    words = in_new_form("flexgen", context.args)
    _check_early(words)
    try:
        from cxl_offload.integrations.fit import session_on
        from cxl_offload.integrations.flexgen import run
        from cxl_offload.integrations.flexgen.options import parse_flags, request_from
        from cxl_offload.memory.heap import keep_freed_memory
        from cxl_offload.topology import load_machine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"flexgen: {error.name} is not installed; pip install flexgen==0.1.8 transformers"
        ) from None
    args = parse_flags(_PROGRAM, words)
    request = request_from(args)
    _check_shown(args)
    _check_outputs(args)
    operators = None if args.profile is None else _operators(args.profile, request.accelerator)
    machine = None if args.machine is None else load_machine(args.machine)
    session = session_on(machine, request.tiers)
    if request.accelerator == "host":
        keep_freed_memory()  # activations come from malloc, layer after layer
    with observed(args.metrics, args.events, session), progress_bar() as progress:
        report = run(request, session=session, progress=progress)
    timeline, why_not = _replayed(report, session)

    def show_it() -> None:
        console = console_of()
        print_report(console, report, timeline, answers=args.verbose >= 2)
        on = None if report.accelerator == "host" else report.accelerator
        for said in beside_plan(report, request.plan, model=args.model, on=on):
            console.print(f"{said}.")
        if operators is not None:
            console.print(_expected(request, report, operators, profile_notes(args.profile)))
        if why_not:
            console.print(f"Note: no simulated tokens/s: {why_not}")

    writes = _writes(args, report, timeline, session)
    write_all(*writes, *([] if args.json else [show_it]))


def _check_early(words: Sequence[str]) -> None:
    """Refuses files that are not there, and kinds that are none, before torch is loaded.

    That takes seconds. FlexGen's parser, which needs torch, reads the words again.
    """
    from cxl_offload.integrations.flexgen.places import parse_place
    from cxl_offload.integrations.model_folder import check_flexgen_model
    from cxl_offload.integrations.prompts import read_prompts
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.topology import load_machine

    given: dict[str, str] = {}
    places: list[str] = []
    for word, value in zip(words, [*words[1:], "-"], strict=True):
        option, is_joined, joined = word.partition("=")
        if not is_joined and value.startswith("-"):
            continue
        if option == "--place":
            places.append(joined if is_joined else value)
        elif option in _FILES:
            given[option] = joined if is_joined else value
    if "--help" in words or "-h" in words:
        return
    for text in places:
        parse_place(text)
    if "--model" in given:
        check_flexgen_model(given["--model"], dummy=_DUMMY in given.get("--path", ""))
    if "--prompts" in given:
        read_prompts(given["--prompts"])
    if "--plan" in given:
        load_plan(given["--plan"])
    if "--machine" in given:
        load_machine(given["--machine"])


def _check_shown(args: Namespace) -> None:
    """Refuses what another option would keep from being shown or written."""
    if args.profile is not None and args.json:
        raise ConfigError(
            f"--profile {args.profile}: --json does not hold what is predicted from it; "
            "--output FILE writes the same JSON beside the tables"
        )
    if args.log_file is not None and args.no_log:
        raise ConfigError(f"--log-file {args.log_file}: --no-log writes none; leave one out")


def _check_outputs(args: Namespace) -> None:
    written = {
        "--output": args.output,
        "--trace": args.trace,
        "--report": args.report,
        "--log-file": args.log_file,
        "--events": args.events,
        "--tune-state": args.tune_state,
    }
    names = ("model", "prompts", "plan", "machine", "profile")
    check_outputs(written, {f"--{name}": getattr(args, name) for name in names})


def _writes(
    args: Namespace, report: FlexGenReport, timeline: Timeline | None, session: Session
) -> list[Callable[[], object]]:
    """What writes each file that is asked for, and prints JSON last."""
    from cxl_offload.integrations.flexgen.options import write_flexgen_log

    writes: list[Callable[[], object]] = []
    if args.report is not None:
        writes.append(lambda: _write_page(args.report, report, timeline, session))
    if args.trace is not None:
        writes.append(lambda: report.trace.save(args.trace))
    if args.log_file is not None:
        writes.append(lambda: write_flexgen_log(report, args.log_file))
    simulated = None if timeline is None else timeline.to_json()
    document = {**report.to_json(), "simulated": simulated}
    files = outputs(args.json, args.output)
    return [*writes, *(partial(write_json, file, document) for file in files)]


def _write_page(
    file: Path, report: FlexGenReport, timeline: Timeline | None, session: Session
) -> None:
    found = {"prefill": report.prefill_tokens_per_s, "decode": report.decode_tokens_per_s}
    how = f"measured, {report.accelerator} accelerator"
    simulated = {} if timeline is None else dict(timeline.tokens_per_s)
    rates = {
        phase: {how: rate, **({"simulated": simulated[phase]} if phase in simulated else {})}
        for phase, rate in found.items()
    }
    write_run_page(
        file, f"FlexGen: {report.model}", session.machine, report.placement, rates, timeline
    )


def _operators(file: str, accelerator: str) -> OperatorProfile:
    from cxl_offload.profile.store import load_profile

    wants_gpu = accelerator == "cuda"
    for found in load_profile(file).operators:
        if (found.device != "cpu") == wants_gpu:
            return found
    device = "cuda" if wants_gpu else "cpu"
    raise ConfigError(
        f"{file}: holds no operators of {device}; "
        f"measure with: cxl-offload profile --operators {device} --output {file}"
    )


def _expected(
    request: FlexGenRun, report: FlexGenReport, operators: OperatorProfile, notes: Sequence[str]
) -> str:
    """The predicted decode speed beside the measured one, or why there is none; then the notes."""
    from cxl_offload.integrations.flexgen.expected import decode_shape
    from cxl_offload.plan.flexgen.decode_time import decode_time

    try:
        shape = decode_shape(
            request, report.config, prompt_len=report.prompt_len, shares=report.shares
        )
    except ConfigError as error:
        return str(error)
    expected = decode_time(shape, operators)
    largest = max(expected.terms, key=lambda name: expected.terms[name])
    said = (
        f"decode: {expected.tokens_per_s:.1f} tokens/s predicted from the profile, "
        f"{report.decode_tokens_per_s:.1f} measured "
        f"({expected.tokens_per_s / report.decode_tokens_per_s - 1:+.0%}); most of it predicted "
        f"for {largest} ({expected.terms[largest] / expected.token_s:.0%})"
    )
    return "\n".join((said, *(f"Note: {note}." for note in notes)))


def _replayed(report: FlexGenReport, session: Session) -> tuple[Timeline | None, str]:
    """What the run would take on the simulated machine; or why that cannot be said."""
    if not session.is_simulated or not len(report.trace):
        return None, ""
    from cxl_offload.sim import replay

    try:
        return replay(report.trace, session.machine), ""
    except ConfigError as error:
        return None, str(error)


def print_report(
    console: Console,
    report: FlexGenReport,
    timeline: Timeline | None = None,
    *,
    answers: bool = True,
) -> None:
    """The tables of one run, and of its replay; ``answers``: also what was generated."""
    from cxl_offload.integrations.flexgen import BYPASSES

    on_host = report.accelerator == "host"
    stand_in = "host (ordinary memory and the CPU in a GPU's place)" if on_host else "CUDA"
    pages = "simulated nodes" if report.simulated_placement else "real nodes"
    console.print(
        f"{report.model}: {report.parameters / 1e6:.1f} M parameters, {report.rows} rows of "
        f"{report.prompt_len} + {report.gen_len} tokens; accelerator: {stand_in}; {pages} of "
        f"{report.machine}"
    )
    how = "measured, host in place of a GPU" if on_host else "measured"
    phases: dict[str, tuple[float | None, float]] = {"load": (None, report.load_seconds)}
    phases["prefill"] = (report.prefill_tokens_per_s, report.prefill_seconds)
    decode = "decode, projected" if report.projected else "decode"
    phases[decode] = (report.decode_tokens_per_s, report.decode_seconds)
    show(console, speed_table(how, phases))
    console.print(load_line(report.load_parts))
    if timeline is not None:
        show(console, simulated_table(timeline))
    show(console, _share_table(report))
    where = placement_table(report.placement, "kind", simulated=report.simulated_placement)
    for home, kinds in report.outside.items():
        for kind, nbytes in kinds.items():
            if nbytes > 0:
                where.add_row(kind, home, "--percent", format_bytes(nbytes), NONE, home)
    show(console, where)
    console.print("\nNot placed by any policy: " + "; ".join(BYPASSES) + ".")
    for note in report.notes:
        console.print(f"Note: {note}.")
    if answers and report.answers:
        console.print("\nAnswers")
        for said in answer_lines(report.answers):
            console.print(said)


def _share_table(report: FlexGenReport) -> Table:
    numbers = ("requested", "realised")
    title = "Shares (FlexGen places whole tensors and whole sequences)"
    made = table(title, "what", "home", *numbers, right=numbers)
    for row in report.shares:
        requested, realised = f"{row.requested_percent:.1f} %", f"{row.realised_percent:.1f} %"
        made.add_row(row.kind, row.home, requested, realised)
    return made
