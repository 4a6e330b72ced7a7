"""What the processes of ``cxl-offload run`` have placed: they leave a file each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cxl_offload.cli._report_file import findings_here, write_page
from cxl_offload.errors import CxlOffloadError
from cxl_offload.report import machine_section, placement_section
from cxl_offload.report.page import PageSection, paragraph
from cxl_offload.topology import Machine, discover, load_machine


@dataclass(frozen=True, slots=True)
class MarkedRow:
    """Bytes of one kind in one process, requested against granted."""

    kind: str
    policy: str
    requested_bytes: int
    granted: Mapping[int, int] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)


def read_marks(folder: Path) -> list[dict[str, Any]]:
    """What each process left, in the order of their ranks; a process that was killed left less."""
    found = []
    for file in sorted(folder.iterdir()):
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            continue
        found.append(document)
    return sorted(found, key=lambda each: int(each.get("rank", 0)))


def write_marked_page(file: Path, title: str, folder: Path, *, seconds: float, code: int) -> None:
    """The page of a run: what every process placed, the machine, and doctor's findings."""
    marks = [each for each in read_marks(folder) if each.get("rows")]
    machine = _machine_of(marks)
    ended = "ended" if code == 0 else f"ended with status {code}"
    said = paragraph(f"{title}: {ended} after {seconds:.1f} s.")
    if not marks:
        said += paragraph("No process on this machine reported a placement.")
    sections = [PageSection("Run", said, "measured")]
    if rows := [row for mark in marks for row in _rows(mark, many=len(marks) > 1)]:
        simulated = any(mark["simulated"] for mark in marks)
        sections.append(placement_section(rows, simulated=simulated))
    write_page(
        file, "cxl-offload run", [*sections, machine_section(machine), *findings_here(machine)]
    )


def _rows(mark: Mapping[str, Any], *, many: bool) -> list[MarkedRow]:
    whose = f" (rank {mark['rank']})" if many else ""
    return [
        MarkedRow(
            f"{row['kind']}{whose}",
            row["policy"],
            row["requested_bytes"],
            {int(node): n for node, n in row["granted_bytes_per_node"].items()},
            row["granted_bytes_per_tier"],
        )
        for row in mark["rows"]
    ]


def _machine_of(marks: list[dict[str, Any]]) -> Machine:
    """The simulated machine that a script chose, where it is a shipped one; else this machine."""
    for mark in marks:
        if mark["simulated"]:
            try:
                return load_machine(mark["machine"])
            except (CxlOffloadError, OSError):
                break
    return discover()
