"""``cxl-offload report``: a machine, and what is known of it, as one HTML file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._plan_inputs import MachineName, ProfileFile, read_machine
from cxl_offload.cli._report_file import findings_here, write_page
from cxl_offload.cli._run_report import write_json
from cxl_offload.files import encode
from cxl_offload.report import machine_section, plan_sections, profile_sections
from cxl_offload.topology import machine_to_json

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.profile import Profile
    from cxl_offload.topology import Machine


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
    as_json: AsJson = False,
) -> None:
    """Write a page about a machine: its picture, doctor's findings, a profile and a plan.

    With --json what the page shows is printed too.

    `--report FILE` of plan, flexgen, generate, profile and doctor writes one about what they did.

    Example: cxl-offload report machine.html --profile profile.json
    """
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.profile import load_profile

    check_outputs({"report": file}, {"--machine": machine, "--profile": profile, "--plan": plan})
    found = read_machine(machine, profile)
    measured = None if profile is None else load_profile(profile)
    planned = None if plan is None else load_plan(plan)
    sections = [
        machine_section(found),
        *findings_here(found),
        *([] if measured is None else profile_sections(measured)),
        *([] if planned is None else plan_sections(planned)),
    ]
    write_page(file, f"Machine {found.name}", sections)
    if as_json:
        write_json("-", {"page": str(file), **_facts(found, measured, planned)})


def _facts(machine: Machine, measured: Profile | None, planned: Plan | None) -> dict[str, Any]:
    """What the page shows, as doctor, profile and plan say it by themselves."""
    from cxl_offload.cli.doctor import hazards_here

    findings = [] if machine.simulated else [asdict(hazard) for hazard in hazards_here()]
    return {
        "machine": json.loads(machine_to_json(machine)),
        "findings": findings,
        "profile": None if measured is None else encode(measured),
        "plan": None if planned is None else encode(planned),
    }
