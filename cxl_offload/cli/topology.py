"""``cxl-offload topology``: the machine, from the kernel, from a capture or from a machine file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cxl_offload.cli._health_report import print_health
from cxl_offload.cli._machine_report import print_machine, print_machine_list
from cxl_offload.cli._options import AsJson, Sysfs
from cxl_offload.cli._report_table import WIDE, console_of
from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine, discover, load_machine, machine_to_json
from cxl_offload.topology.health import read_health
from cxl_offload.topology.tree import Tree


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("topology")(topology)


def topology(
    as_json: AsJson = False,
    sysfs: Sysfs = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Show a machine file: a path or a known name, e.g. xeon8468:snc=4,prefetch=off.",
        ),
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="With --machine: where each number comes from.")
    ] = False,
    known: Annotated[bool, typer.Option("--list", help="List the known machine files.")] = False,
) -> None:
    """Show NUMA nodes, CXL memory, GPUs, links, limits and memory errors of a machine.

    Example: cxl-offload topology --machine epyc9354-cxl-a
    """
    console = console_of(piped_width=WIDE)
    if known:
        one = {"--machine": machine, "--sysfs": sysfs, "--sources": sources, "--json": as_json}
        for option, value in one.items():
            if value:
                raise ConfigError(f"{option}: --list prints names, and no machine; leave one out")
        print_machine_list(console)
        return
    if sources and machine is None:
        raise ConfigError("--sources shows the citations of a machine file: add --machine FILE")
    shown = _find(sysfs, machine)
    if as_json:
        print(machine_to_json(shown))
    else:
        print_machine(console, shown, sources=sources)
        if machine is None:
            print_health(console, read_health(Tree(_root(sysfs)), shown))


def _root(sysfs: Path | None) -> Path:
    return Path("/") if sysfs is None else sysfs


def _find(sysfs: Path | None, machine: str | None) -> Machine:
    if sysfs is not None and machine is not None:
        raise ConfigError("--sysfs and --machine exclude each other: give one of them")
    if machine is not None:
        return load_machine(machine)
    return discover(_root(sysfs))
