"""``cxl-offload report``: a machine, and what is known of it, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._plan_inputs import MachineName, ProfileFile, read_machine
from cxl_offload.cli._report_file import findings_here, write_page
from cxl_offload.report import machine_section, plan_sections, profile_sections


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("report")(report)


def report(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    machine: MachineName = None,
    profile: ProfileFile = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A plan.yaml to show too.")
    ] = None,
) -> None:
    """Write a page about a machine: its picture, doctor's findings, a profile and a plan.

    `--report FILE` of plan, flexgen, generate, profile and doctor writes one about what they did.

    Example: cxl-offload report machine.html --profile profile.json
    """
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.profile import load_profile

    check_outputs({"report": file}, {"--machine": machine, "--profile": profile, "--plan": plan})
    found = read_machine(machine, profile)
    sections = [machine_section(found), *findings_here(found)]
    if profile is not None:
        sections += profile_sections(load_profile(profile))
    if plan is not None:
        sections += plan_sections(load_plan(plan))
    write_page(file, f"Machine {found.name}", sections)
