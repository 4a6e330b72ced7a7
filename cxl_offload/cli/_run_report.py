"""What runs of all engines print: progress, speed by phase, and where the bytes are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cxl_offload.cli._report_table import NONE, lines, table
from cxl_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from cxl_offload.objects import PlacementRow

__all__ = ["placement_table", "progress_bar", "speed_table"]

_STAGES = {"convert": "converting weights", "load": "loading layers", "generate": "tokens"}


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for every stage of a run; silent when stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(_STAGES.get(stage, stage), total=total)
            bar.update(tasks[stage], completed=done)

        yield show


def speed_table(how: str, phases: Mapping[str, tuple[float | None, float]]) -> Table:
    """Tokens/s, where a phase makes tokens, and seconds of every phase; ``how`` they were found."""
    made = table(f"Speed ({how})", "phase", "tokens/s", "time", right=("tokens/s", "time"))
    for phase, (rate, seconds) in phases.items():
        made.add_row(phase, NONE if rate is None else f"{rate:.1f}", format_seconds(seconds))
    return made


def placement_table(rows: Iterable[PlacementRow], kind: str, *, simulated: bool) -> Table:
    """Requested against granted; ``kind`` is the heading of the first column."""
    pages = "pages of simulated nodes" if simulated else "read from the pages"
    title = f"Where the bytes are, at their peak (host memory: {pages})"
    headings = (kind, "part", "policy", "requested", "granted by node", "by tier")
    made = table(title, *headings, right=("requested",))
    for row in rows:
        made.add_row(
            row.kind,
            row.part,
            row.policy,
            format_bytes(row.requested_bytes),
            lines(f"{node}: {format_bytes(count)}" for node, count in row.granted.items()),
            lines(f"{name}: {format_bytes(count)}" for name, count in row.tiers.items()),
        )
    return made
