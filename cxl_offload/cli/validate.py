"""``cxl-offload validate``: predictions of the cost model against published cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._progress import counted, progress_bar
from cxl_offload.cli._report_table import WIDE, console_of, need_matplotlib, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.units import format_number

if TYPE_CHECKING:
    from cxl_offload.validation import PassRate, Result


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("validate")(validate_command)


def validate_command(
    cases: Annotated[
        Path | None, typer.Argument(help="JSON file of published cases; default: the shipped ones.")
    ] = None,
    as_json: AsJson = False,
    failed_only: Annotated[
        bool, typer.Option("--failed", help="List only the cases that fail.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write a scatter plot, predicted vs published (PNG).")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit with status 1 if any case fails.")] = False,
) -> None:
    """Predict published cases with the cost model and report what passes.

    Example: cxl-offload validate --failed
    """
    from cxl_offload.validation import SHIPPED, absolute_errors, load_cases, validate

    check_outputs({"--plot": plot}, {"CASES": cases})
    if failed_only and as_json:
        raise ConfigError("--failed: --json says of each case whether it passes; leave one out")
    if plot is not None:
        need_matplotlib("--plot", plot)
    with progress_bar(keep=False, lines=not as_json) as tell:
        files = SHIPPED if cases is None else (cases,)
        asked = [case for file in files for case in load_cases(file)]
        results = validate(counted(asked, "cases predicted", tell))
    if plot is not None:  # before what is printed: a reader such as `head` may end the program
        from cxl_offload.validation.plot import plot_results

        plot_results(results, plot)
    if as_json:
        entries = [result.as_json() for result in results]
        found = absolute_errors(results)
        absolute = {} if found is None else {"absolute": asdict(found)}
        write_json("-", {"cases": entries, **absolute})
    else:
        _print_report(results, failed_only=failed_only)
    if strict and not all(result.passes for result in results):
        raise typer.Exit(1)


def _print_report(results: Sequence[Result], *, failed_only: bool) -> None:
    from cxl_offload.validation import absolute_errors, pass_rates
    from cxl_offload.validation.report import FAR

    console = console_of(piped_width=WIDE)
    listed = [result for result in results if not (failed_only and result.passes)]
    if listed:
        show(console, _case_table(listed))
    show(console, _rate_table("use", pass_rates(results, lambda result: result.case.use)))
    show(console, _rate_table("model", pass_rates(results, lambda result: result.case.model)))
    found = absolute_errors(results)
    if found is None:
        return
    unanswered = f", {found.unanswered} not answered" if found.unanswered else ""
    console.print(
        f"\nPlans against {found.cases} published absolute results{unanswered}: off by "
        f"{found.median:.1%} in the median, {found.worst:.2f}x at worst ({found.worst_id}); "
        f"{found.beyond} by more than {FAR}x."
    )


def _case_table(results: Sequence[Result]) -> Table:
    numbers = ("predicted", "published", "error")
    made = table(
        "Predicted vs published", "case", "model", "use", *numbers, "", "note", right=numbers
    )
    for result in results:
        made.add_row(
            result.case.id,
            result.case.model,
            result.case.use,
            "-" if result.predicted is None else _shown(result.predicted),
            _shown(result.as_json()["expected"]),
            "-" if result.error is None else f"{result.error:.2%}",
            Text("pass", "green") if result.passes else Text("FAIL", "red"),
            result.note,
        )
    return made


def _rate_table(what: str, rates: Sequence[PassRate]) -> Table:
    numbers = ("passed", "cases", "rate")
    made = table(f"Pass rates by {what}", what, *numbers, right=numbers)
    for rate in rates:
        made.add_row(rate.name, str(rate.passed), str(rate.cases), f"{rate.share:.0%}")
    total = sum(rate.cases for rate in rates)
    passed = sum(rate.passed for rate in rates)
    share = f"{passed / total:.0%}" if total else "-"
    made.add_row("all", str(passed), str(total), share, style="bold")
    return made


def _shown(value: object) -> str:
    """A prediction or a published value for people: four digits, bounds as such."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(bound)}" for name, bound in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_shown(item) for item in value)
    if isinstance(value, float):
        return format_number(value)
    return str(value)
