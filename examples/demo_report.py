"""What the demonstration prints and draws: tables on the terminal, and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cxl_offload.files import write_text
from cxl_offload.integrations.flexgen import FlexGenReport
from cxl_offload.report import (
    PageSection,
    machine_section,
    made_now,
    measured_section,
    placement_section,
    render_page,
    timeline_section,
)
from cxl_offload.report.page import html_table, paragraph
from cxl_offload.sim import Timeline
from cxl_offload.topology import Machine
from cxl_offload.units import MIB, format_bandwidth, format_bytes

# Okabe and Ito's colours: told apart by the colour-blind, too.
COLOURS = {"ldram": "#0072B2", "rdram": "#56B4E9", "cxl": "#D55E00", "accelerator": "#999999"}
MEASURED, SIMULATED = "#009E73", "#CC79A7"


@dataclass(frozen=True)
class Result:
    """One run: its name, what FlexGen reported and, simulated, the time it would take."""

    name: str
    report: FlexGenReport
    timeline: Timeline | None = None

    @property
    def is_compared(self) -> bool:
        """Whether its speed is shown: a run without a placement only gives the tokens to expect."""
        return self.timeline is not None or any(
            row.policy != "first-touch" for row in self.report.placement
        )

    def tokens_per_s(self, phase: str) -> float:
        """Of ``prefill`` or ``decode``: replayed on simulated nodes, measured on this machine."""
        if self.timeline is not None:
            return float(self.timeline.tokens_per_s[phase])
        measured = {
            "prefill": self.report.prefill_tokens_per_s,
            "decode": self.report.decode_tokens_per_s,
        }
        return measured[phase]

    def tier_bytes(self) -> dict[str, int]:
        """Bytes by tier, and what stays on the accelerator."""
        total = dict.fromkeys(COLOURS, 0)
        for row in self.report.placement:
            for tier, count in row.tiers.items():
                total[tier] = total.get(tier, 0) + count
        total["accelerator"] = sum(self.report.outside.get("accelerator", {}).values())
        return total

    def to_json(self) -> dict[str, Any]:
        """The report, and what a replay gave."""
        simulated = None
        if self.timeline is not None:
            phases = ("prefill", "decode")
            simulated = {f"{phase}_tokens_per_s": self.tokens_per_s(phase) for phase in phases}
        return {"name": self.name, **self.report.to_json(), "simulated": simulated}


def _table(*headings: str, left: int) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for at, heading in enumerate(headings):
        justify = "left" if at < left else "right"
        made.add_column(heading, justify=justify, overflow="fold", no_wrap=at == 0)
    return made


def print_nodes(console: Console, here: Machine, published: Machine) -> None:
    """The nodes of this machine and of the published one."""
    made = _table("machine", "node", "kind", "CPUs", "memory", "loads, published", left=3)
    for title, machine in (("this machine", here), (f"system A: {published.name}", published)):
        for node in machine.nodes:
            access = machine.access(machine.initiator, node.id)
            rate = None if access is None else access.read_bandwidth_bytes_per_s
            made.add_row(
                title,
                str(node.id),
                node.kind.value,
                str(len(node.cpus)),
                format_bytes(node.capacity_bytes),
                "-" if rate is None else format_bandwidth(rate),
            )
            title = ""
    console.print(made)


def print_placement(console: Console, results: Sequence[Result]) -> None:
    """Requested against granted bytes of every kind on every node."""
    made = _table("run", "kind", "policy", "requested", "granted, by node", left=3)
    for result in results:
        title = result.name
        for row in result.report.placement:
            granted = ", ".join(f"{n}: {format_bytes(b)}" for n, b in row.granted.items())
            asked = format_bytes(row.requested_bytes)
            made.add_row(title, row.kind, row.policy, asked, granted)
            title = ""
        for home, kinds in result.report.outside.items():
            for kind, count in kinds.items():
                if count:
                    made.add_row(title, kind, f"on the {home}", format_bytes(count), "-")
    console.print("\nWhere everything went (granted: asked from the pages, at the peak)")
    console.print(made)


def print_speed(
    console: Console, results: Sequence[Result], same: Sequence[bool], notes: Sequence[str]
) -> None:
    """Tokens/s of every run, measured and simulated in columns of their own."""
    phases = ("prefill", "decode")
    headings = [f"{kind}\n{phase}" for kind in ("measured", "simulated") for phase in phases]
    made = _table("run", *headings, "tokens", left=1)
    for result, identical in zip(results, same, strict=True):
        rates = [f"{result.tokens_per_s(phase):,.1f}" for phase in phases]
        if not result.is_compared:
            rates = ["-", "-"]
        cells = [*rates, "-", "-"] if result.timeline is None else ["-", "-", *rates]
        made.add_row(result.name, *cells, "same" if identical else "DIFFERENT")
    console.print("Tokens/s")
    console.print(made)
    for note in notes:
        console.print(f"{note}.")


def speed_notes(here: Machine) -> list[str]:
    """What must be known before two speeds are compared, sentences without their full stops."""
    notes = [
        "Measured: the CPU of this machine stands in for a GPU",
        "Simulated: the bytes that the run moved, replayed on the links and nodes of system A",
    ]
    if len(here.usable_nodes()) == 1:
        notes.append(
            "This machine has one node, where no placement can gain anything; the untiered run "
            "gives the tokens to compare with, and its speed, that of a program's first run, is "
            "left out"
        )
    return notes


def write_page(
    path: Path,
    results: Sequence[Result],
    same: Sequence[bool],
    answers: Sequence[tuple[str, str, str]],
    machines: Sequence[Machine],
) -> None:
    """All of it as one HTML page: answers, speed, the bytes of the last run, machines.

    ``machines`` are this one and the published one.
    """
    last = results[-1]
    how = {True: "measured", False: "simulated"}
    rates: dict[str, dict[str, float | None]] = {
        f"{result.name}, {phase}": {how[result.timeline is None]: result.tokens_per_s(phase)}
        for result in results
        if result.is_compared
        for phase in ("prefill", "decode")
    }
    said = "the same in all runs" if all(same) else "DIFFERENT, which must never happen"
    sections = [
        *([PageSection("The Zen of Python, by heart", _answers(answers))] if answers else []),
        measured_section(rates, notes=speed_notes(machines[0])),
        PageSection("Tokens", paragraph(f"The tokens are {said}.")),
        placement_section(
            last.report.placement, simulated=last.timeline is not None, run=last.name
        ),
        *([] if last.timeline is None else [timeline_section(last.timeline, run=last.name)]),
        *map(machine_section, machines),
    ]
    title = "Tensors in memory tiers: the demo"
    write_text(str(path), render_page(title, made_now(), sections))


def _answers(answers: Sequence[tuple[str, str, str]]) -> str:
    heading = "went on by FlexGen, its weights on the CXL node of system A (simulated)"
    return html_table(("given", heading, "by transformers, its weights there too"), answers)


def draw(results: Sequence[Result], path: Path) -> None:
    """One picture: bytes by tier of every run, and its decode tokens/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, here, there) = pyplot.subplots(
        1, 3, figsize=(13, 1.2 + 0.62 * len(results)), sharey=True, width_ratios=(5, 2, 3)
    )
    names = [result.name for result in results]
    start = [0.0] * len(results)
    for tier, colour in COLOURS.items():
        widths = [result.tier_bytes()[tier] / MIB for result in results]
        if any(widths):
            left.barh(names, widths, left=start, color=colour, label=tier, height=0.62)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("MiB at the peak, asked from the pages")
    left.set_title("Where weights, KV cache and activations went", loc="left")
    left.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncol=4, frameon=False)
    _draw_rates(here, results, simulated=False)
    _draw_rates(there, results, simulated=True)
    for axis in (left, here, there):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _draw_rates(axis: Any, results: Sequence[Result], *, simulated: bool) -> None:
    """Decode tokens/s of one kind, on a scale of its own: the machines are not to be compared."""
    for at, result in enumerate(results):
        if (result.timeline is not None) is not simulated:
            continue
        rate = result.tokens_per_s("decode") if result.is_compared else 0.0
        axis.barh(result.name, rate, color=SIMULATED if simulated else MEASURED, height=0.62)
        axis.annotate(f" {rate:,.0f}" if rate else " for its tokens", (rate, at), va="center")
    axis.set_xlabel("decode tokens/s, simulated" if simulated else "decode tokens/s, measured")
    axis.margins(x=0.3)
    axis.set_title("How fast there" if simulated else "How fast here", loc="left")
