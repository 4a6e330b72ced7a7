"""``--report FILE``: what a command found as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import RESULTS
from cxl_offload.errors import ConfigError, printable
from cxl_offload.files import write_text
from cxl_offload.report import (
    PageSection,
    findings_section,
    machine_section,
    made_now,
    measured_section,
    placement_section,
    plan_sections,
    render_page,
    timeline_section,
    what_if_section,
)
from cxl_offload.topology import Machine, NodeKind, load_machine
from cxl_offload.units import GIB, MIB

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.report.sections import PlacedRow
    from cxl_offload.sim import Timeline

PUBLISHED_CARD = "epyc9354-cxl-a"
"""The machine file whose card stands for one more, where a machine has none of its own."""

ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write it all as one HTML page, which needs no network.",
        rich_help_panel=RESULTS,
    ),
]


def write_page(file: Path, title: str, sections: Iterable[PageSection]) -> None:
    """Writes the page and says where it is, on stderr: stdout may be JSON."""
    write_text(str(file), render_page(title, made_now(), sections))
    typer.echo(f"report: {printable(str(file))}", err=True)


def findings_here(machine: Machine) -> list[PageSection]:
    """What doctor says, where the machine is the running one."""
    if machine.simulated:
        return []
    from cxl_offload.cli.doctor import hazards_here

    return [findings_section(hazards_here())]


def write_run_page(
    file: Path,
    title: str,
    machine: Machine,
    rows: Iterable[PlacedRow],
    rates: Mapping[str, Mapping[str, float | None]],
    timeline: Timeline | None = None,
    *,
    notes: Iterable[str] = (),
    about_speed: Iterable[str] = (),
) -> None:
    """The page of a run: machine, bytes, speed, and where there is one its timeline."""
    parts = [
        measured_section(rates, notes=about_speed),
        placement_section(rows, simulated=machine.simulated, notes=notes),
        *([] if timeline is None else [timeline_section(timeline)]),
        machine_section(machine),
        *findings_here(machine),
    ]
    write_page(file, title, parts)


def write_plan_page(
    file: Path,
    plan: Plan,
    machine: Machine,
    timeline: Timeline | None,
    with_machine: Callable[[Machine], Plan],
) -> None:
    """The page of a plan.

    Parameters
    ----------
    with_machine
        Plans the same for another machine: for what one more card would bring.
    """
    verdict, *others = plan_sections(plan)
    card, more = _one_more_card(machine), _planned_again(machine, with_machine)
    parts = [
        verdict,
        machine_section(machine),
        *others,
        what_if_section(plan, card, more),
        *([] if timeline is None else [timeline_section(timeline)]),
        *findings_here(machine),
    ]
    write_page(file, f"Plan: {plan.model} on {plan.machine}", parts)


def _planned_again(machine: Machine, with_machine: Callable[[Machine], Plan]) -> Plan | str:
    from cxl_offload.plan.what_if import with_memory

    try:
        return with_machine(with_memory(machine, _one_more_card(machine)))
    except (MemoryError, ValueError) as error:
        return str(error)


def _one_more_card(machine: Machine) -> str:
    """A card like one that the machine has, or like a published one: ``cxl=SIZE:RATE:LATENCY``."""
    published = load_machine(PUBLISHED_CARD)
    for each in (machine, published):
        for node in each.nodes:
            access = each.access(each.initiator, node.id)
            if node.kind is not NodeKind.CXL or access is None:
                continue
            rate, latency = access.read_bandwidth_bytes_per_s, access.read_latency_ns
            if rate and latency and node.capacity_bytes:
                whole = node.capacity_bytes // GIB * GIB == node.capacity_bytes
                size = f"{node.capacity_bytes // (GIB if whole else MIB)}{'G' if whole else 'M'}iB"
                return f"cxl={size}:{rate / 1e9:.4g}GB/s:{latency:.4g}ns"
    raise ConfigError(f"{PUBLISHED_CARD}: its card has no numbers")
