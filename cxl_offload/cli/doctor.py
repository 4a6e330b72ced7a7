"""``cxl-offload doctor``: what on this machine will hurt, what it costs and what fixes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cxl_offload.cli._options import AsJson, Sysfs
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._report_file import ReportFile, write_page
from cxl_offload.cli._report_table import WIDE, console_of
from cxl_offload.cli._run_report import write_json
from cxl_offload.report import findings_section, machine_section
from cxl_offload.topology import discover
from cxl_offload.topology.hazards import SEVERITIES, Hazard, find_hazards

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("doctor")(doctor)


def doctor(
    as_json: AsJson = False,
    sysfs: Sysfs = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with status 1 on an error or a warning.")
    ] = False,
    report: ReportFile = None,
) -> None:
    """Say what on this machine will hurt, what it costs, and the command that fixes it.

    Example: cxl-offload doctor
    """
    check_outputs({"--report": report})
    hazards = hazards_here() if sysfs is None else find_hazards(sysfs)
    if report is not None:  # before what is printed, whose reader may stop early
        found = discover("/" if sysfs is None else sysfs)
        sections = [findings_section(hazards), machine_section(found)]
        write_page(report, f"Doctor: {found.name}", sections)
    if as_json:
        rows = [asdict(hazard) for hazard in hazards]
        write_json("-", {"hazards": rows})
    else:
        print_hazards(console_of(piped_width=WIDE), hazards)
    if strict and any(hazard.severity != "note" for hazard in hazards):
        raise typer.Exit(1)


def hazards_here() -> tuple[Hazard, ...]:
    """What is found on this machine, the worst first; one page is placed to see that it works."""
    found = (*find_hazards("/", placing_refused=_try_placing(), tried=True), *_leftovers())
    return tuple(sorted(found, key=lambda hazard: SEVERITIES.index(hazard.severity)))


def _try_placing() -> str | None:
    """The error of placing one page on the nearest node, or None when that works."""
    from cxl_offload.memory import Bind, Session  # slower to load than the rest together

    session = Session.linux()
    try:
        session.allocate(1, Bind((session.kernel.local_node,)))
    except OSError as error:
        return str(error.strerror or error)
    except (MemoryError, ValueError):
        return None  # full, or a node without memory: not refused
    return None


def _leftovers() -> Iterator[Hazard]:
    """Shared memory of processes that are gone."""
    from cxl_offload.memory import find_leftovers

    for leftover in find_leftovers():
        yield Hazard(
            "shared-leftover",
            "warning",
            str(leftover),
            "its pages stay taken until it is removed or the machine restarts",
            leftover.remedy,
            f"no process holds its lock; owner: user {leftover.owner}",
        )


def print_hazards(console: Console, hazards: tuple[Hazard, ...]) -> None:
    """Each with what it costs and what fixes it, and their number."""
    if not hazards:
        console.print(Text("Nothing found that would hurt.", "green"))
        return
    for hazard in hazards:
        head = (f"{hazard.severity}  ", _STYLES[hazard.severity]), (hazard.name, "bold")
        console.print(Text.assemble(*head))
        made = Table.grid(padding=(0, 2))
        made.add_column(style="dim")
        made.add_column(overflow="fold")
        made.add_row("found", hazard.found)
        made.add_row("costs", hazard.cost)
        command, _, more = hazard.remedy.partition("  # ")
        made.add_row("fix", Text(command, "green"))
        if more:  # in a row of its own: a command is copied with all that is beside it
            made.add_row("", more)
        made.add_row("says", Text(hazard.source, "dim"))
        console.print(Padding(made, (0, 0, 1, 2)))
    counts = {name: sum(hazard.severity == name for hazard in hazards) for name in _STYLES}
    console.print(", ".join(f"{count} {name}(s)" for name, count in counts.items() if count))
