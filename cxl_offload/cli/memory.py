"""``cxl-offload memory``: who holds the host memory of a process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._report_table import WIDE, console_of, show, table
from cxl_offload.units import format_bytes

if TYPE_CHECKING:
    from cxl_offload.objects import MemoryReport


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("memory")(memory)


def memory(
    pid: Annotated[int, typer.Argument(help="The process, of any program.", min=1)],
    as_json: AsJson = False,
) -> None:
    """Show who holds the host memory of a process, by owner and node.

    Example: cxl-offload memory 4711. Inside of a program cxl_offload.memory_report() also tells
    parameters, optimizer states and KV caches apart.
    """
    from cxl_offload.objects import report_of_process

    report = report_of_process(pid)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)


def _print(report: MemoryReport) -> None:
    console = console_of(piped_width=WIDE)
    nodes = sorted(report.nodes())
    numbers = ["in memory", *(f"node {node}" for node in nodes), "huge pages", "locked", "swapped"]
    made = table(f"Host memory of process {report.pid}", "owner", *numbers, right=numbers)
    for holder in report.holders:
        by_node = [holder.nodes.get(node, 0) for node in nodes]
        rest = (holder.huge_bytes, holder.locked_bytes, holder.swapped_bytes)
        counts = (holder.resident_bytes, *by_node, *rest)
        made.add_row(holder.owner, *(format_bytes(count) if count else "-" for count in counts))
    total = [report.resident_bytes, *(report.nodes()[node] for node in nodes)]
    made.add_row("together", *(format_bytes(count) for count in total), "", "", "")
    show(console, made)
    cached = table("Checkpoints in the page cache, which is the kernel's", "file", "cached")
    for path, count in report.cached_files.items():
        cached.add_row(path, format_bytes(count))
    show(console, cached)
    if not report.holders:
        console.print(Text("It has no memory of its own."))
