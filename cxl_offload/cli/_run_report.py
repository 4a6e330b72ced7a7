"""What runs of all engines print: speed by phase, and where the bytes are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cxl_offload.cli._report_table import NONE, lines, table
from cxl_offload.files import write_text
from cxl_offload.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from cxl_offload.objects import PlacementRow
    from cxl_offload.objects.load_parts import LoadPart
    from cxl_offload.sim import Timeline

_VERSION = 1
"""Of the form of every report in JSON; it grows when a key goes or changes its meaning."""


def write_json(file: str, document: Mapping[str, Any]) -> None:
    """Writes a report with the version of its form, or prints it where the file is ``-``."""
    text = json.dumps({"version": _VERSION, **document}, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        write_text(file, text)


def speed_table(how: str, phases: Mapping[str, tuple[float | None, float]]) -> Table:
    """Tokens/s, where a phase makes tokens, and seconds of every phase; ``how`` they were found."""
    made = table(f"Speed ({how})", "phase", "tokens/s", "time", right=("tokens/s", "time"))
    for phase, (rate, seconds) in phases.items():
        made.add_row(phase, NONE if rate is None else format_number(rate), format_seconds(seconds))
    return made


def load_line(parts: Iterable[LoadPart]) -> str:
    """The parts of a load that took time, with the rate of those that move bytes."""
    from cxl_offload.objects.load_parts import REST

    took = [part for part in parts if part.seconds]
    if [part.name for part in took] == [REST]:
        spent = format_seconds(took[0].seconds)
        return f"Load (measured): {spent} by the framework; no weights were read into a tier."
    told = []
    for part in took:
        moved = f"{format_bytes(part.nbytes)}, {part.bytes_per_s / 1e9:.2f} GB/s"
        of_bytes = f" ({moved})" if part.nbytes else ""
        told.append(f"{part.name} {format_seconds(part.seconds)}{of_bytes}")
    return f"Load (measured): {', '.join(told)}."


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


def answer_lines(answers: Sequence[str]) -> Iterator[str]:
    """What was generated, by row; rows next to each other that say the same share a line."""
    first = 0
    for text, alike in groupby(answers):
        last = first + sum(1 for _ in alike) - 1
        yield f"{first}: {text}" if first == last else f"{first} to {last}: {text}"
        first = last + 1


def simulated_table(timeline: Timeline) -> Table:
    """Of the phases with tokens, and what would bound each."""
    made = table(
        f"Speed (simulated: the bytes of this run replayed on {timeline.machine})",
        *("phase", "tokens/s", "time", "busiest"),
        right=("tokens/s", "time"),
    )
    for phase, rate in timeline.tokens_per_s.items():
        busiest = timeline.bottleneck(phase)
        busy = timeline.utilisation(phase).get(busiest)
        made.add_row(
            phase,
            f"{rate:.1f}",
            format_seconds(timeline.phase_seconds[phase]),
            busiest if busy is None else f"{busiest} ({busy:.0%} of the time)",
        )
    return made
