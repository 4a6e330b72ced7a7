"""``cxl-offload topology``: the machine, from the kernel, from a capture or from a machine file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cxl_offload.cli._machine_report import print_machine, print_machine_list
from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine, discover, load_machine, machine_to_json

__all__ = ["register"]

_PIPED_WIDTH = 140  # a pipe has no width of its own


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("topology")(topology)


def topology(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    sysfs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Read DIR/sys and DIR/proc, a capture of a machine."),
    ] = None,
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
    """Show NUMA nodes, CXL memory, GPUs, links and limits of a machine."""
    # names and addresses come from the machine: none of them is markup or an emoji
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    width = _PIPED_WIDTH if piped else None
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    if known:
        print_machine_list(console)
        return
    if sources and machine is None:
        raise ConfigError("--sources shows the citations of a machine file: add --machine FILE")
    shown = _find(sysfs, machine)
    if as_json:
        print(machine_to_json(shown))
    else:
        print_machine(console, shown, sources=sources)


def _find(sysfs: Path | None, machine: str | None) -> Machine:
    if sysfs is not None and machine is not None:
        raise ConfigError("--sysfs and --machine exclude each other: give one of them")
    if machine is not None:
        return load_machine(machine)
    return discover(sysfs if sysfs is not None else "/")
