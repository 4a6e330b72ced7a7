"""Sections of a page, made of what the package's own objects say."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cxl_offload.report.charts import LaneBar, lanes, legend, line_chart, plain_bar, share_bar
from cxl_offload.report.machine_picture import machine_picture
from cxl_offload.report.page import PageSection, command_text, escaped, html_table, paragraph
from cxl_offload.topology import Machine
from cxl_offload.topology.hazards import Hazard
from cxl_offload.units import GB, format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.profile.model import Profile
    from cxl_offload.sim import Timeline

DRAWN_STEPS = 12
"""Of a decode: a token has so many steps that nothing would be seen of one."""


class PlacedRow(Protocol):
    """A row of requested against granted bytes, as every engine reports them."""

    @property
    def kind(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def requested_bytes(self) -> int: ...
    @property
    def granted(self) -> Mapping[int, int]: ...
    @property
    def tiers(self) -> Mapping[str, int]: ...


def machine_section(machine: Machine) -> PageSection:
    """The picture of a machine, and what its numbers are."""
    how = "from a machine file: published or assumed" if machine.simulated else "as found here"
    seen = f"GB/s and ns are as the CPUs of node {machine.initiator} see it ({how})."
    about = paragraph(machine.description) if machine.description else ""
    notes = "".join(paragraph(note, "dim") for note in machine.notes)
    order = paragraph(_SOCKETS, "dim") if _sockets_out_of_order(machine) else ""
    body = about + machine_picture(machine) + paragraph(seen, "dim") + order + notes
    title = f"Machine {machine.name}" if machine.simulated else f"This machine, {machine.name}"
    return PageSection(title, body)


_SOCKETS = (
    "Sockets have the numbers that the source prints; "
    "nodes are numbered from the one whose CPUs work."
)


def _sockets_out_of_order(machine: Machine) -> bool:
    """Whether a machine file numbers nodes otherwise than its source numbers sockets."""
    numbers = [node.socket for node in machine.nodes if node.cpus and node.socket is not None]
    return machine.simulated and numbers != sorted(numbers)


def findings_section(hazards: Sequence[Hazard]) -> PageSection:
    """What doctor found."""
    body = "".join(
        f'<p><b class="{escaped(each.severity)}">{escaped(each.severity)}</b> '
        f"<b>{escaped(each.name)}</b>: {escaped(each.found)}. {escaped(each.cost)}.</p>"
        f"{command_text(each.remedy)}"
        for each in hazards
    )
    return PageSection("What doctor found", body or paragraph("Nothing that would hurt.", "good"))


def plan_sections(plan: Plan) -> list[PageSection]:
    """Verdict, homes, times and prices of a plan."""
    from cxl_offload.plan.headline import copies_in_words, seen_by_requests, speed, waits

    batch = plan.batch
    prompt = f"{batch.prompt} + " if batch.prompt else ""
    cxl = "used" if plan.cxl.used else "left alone"
    gain = "" if plan.cxl.gain is None else f" ({plan.cxl.gain:+.1%})"
    verdict = paragraph(
        f"{plan.model} on {plan.machine} with {plan.executor}: "
        f"batch {batch.size} x {batch.count}, {prompt}{batch.tokens} tokens; {speed(plan)}."
    )
    verdict += "".join(paragraph(f"{said}.") for said in waits(plan))
    verdict += paragraph(f"CXL memory: {cxl}{gain}; {plan.cxl.reason}.")
    if plan.copies is not None:
        verdict += paragraph(f"Copies of weights: {copies_in_words(plan.copies)}.")
    if not plan.runs:
        verdict += paragraph(f"Advice only: {plan.advice}.")
    if plan.runs:
        verdict += command_text(shlex.join(plan.command_in("plan.yaml")))
    if plan.serving is not None:
        verdict += paragraph(f"{seen_by_requests(plan.serving)}.")
    verdict += "".join(paragraph(f"{note}.", "dim") for note in (*plan.why, *plan.notes))
    if plan.error is not None:
        error = plan.error
        verdict += paragraph(
            f"Predicted error: median {error.median:.1%}, worst {error.worst:.1%} of {error.cases} "
            f"cases; {error.source}.",
            "dim",
        )
    return [
        PageSection("Plan", verdict, "predicted"),
        PageSection("Where every kind of tensor goes", _homes(plan), "predicted"),
        PageSection("Time and what bounds it", _phases(plan), "predicted"),
        PageSection("Gain from one more GiB or GB/s", _prices(plan), "predicted"),
    ]


def _homes(plan: Plan) -> str:
    kinds = list(dict.fromkeys(home.kind for home in plan.homes))
    tiers = list(dict.fromkeys(home.where for home in plan.homes))
    sizes = {kind: {t: float(n) for t, n in plan.of(kind).items()} for kind in kinds}
    most = max((sum(each.values()) for each in sizes.values()), default=0.0)
    bars = "".join(
        f"<div>{escaped(kind)} <span class='dim'>{format_bytes(int(sum(parts.values())))}</span>"
        f"{share_bar(parts, tiers, most)}</div>"
        for kind, parts in sizes.items()
    )
    rows = [
        (home.kind, home.where, format_bytes(home.bytes), f"{home.percent:.1f} %", home.policy)
        for home in plan.homes
    ]
    headings = ("kind", "where", "bytes", "share", "policy")
    return legend(tiers) + bars + html_table(headings, rows, right=("bytes", "share"))


def _phases(plan: Plan) -> str:
    parts = []
    for phase in plan.phases:
        terms = [name for name, seconds in phase.terms.items() if seconds]
        most = max((phase.terms[name] for name in terms), default=0.0)
        parts.append(
            f"<p><b>{escaped(phase.name)}</b>: {escaped(format_seconds(phase.seconds))}, bound by "
            f"{escaped(phase.bottleneck)}</p>"
        )
        parts += [
            f'<div class="dim">{escaped(name)} {escaped(format_seconds(phase.terms[name]))}</div>'
            + plain_bar(phase.terms[name], most)
            for name in terms
        ]
    return "".join(parts)


def _prices(plan: Plan) -> str:
    rows = [
        (each.what, f"1 {each.unit}", f"+{format_number(each.gain_tokens_per_s)}")
        for each in plan.prices
        if each.brings_something
    ]
    table = html_table(("resource", "unit", "tokens/s"), rows, right=("tokens/s",))
    idle = plan.idle_resources()
    return table + (paragraph(idle, "dim") if idle else "")


def what_if_section(plan: Plan, card: str, with_card: Plan | str) -> PageSection:
    """The plan beside one for the machine with a card more, or why there is none."""
    title = f"With one more card ({card})"
    if isinstance(with_card, str):
        return PageSection(title, paragraph(f"No plan: {with_card}"), "predicted")
    gain = with_card.tokens_per_s / plan.tokens_per_s - 1
    most = max(plan.tokens_per_s, with_card.tokens_per_s)
    ways = ["as it is", "with the card"]
    rows = list(zip(ways, (plan, with_card), strict=True))
    bars = "".join(
        f"<div>{name}: {format_number(each.tokens_per_s)} tokens/s, batch "
        f"{each.batch.size} x {each.batch.count} "
        f"{plain_bar(each.tokens_per_s, most)}</div>"
        for name, each in rows
    )
    said = paragraph(
        f"{gain:+.1%} tokens/s. This is a whole card, capacity, bandwidth and all; what one more "
        "brings, above, is of a single GiB or GB/s."
    )
    return PageSection(title, said + bars, "predicted")


def placement_section(
    rows: Iterable[PlacedRow], *, simulated: bool, notes: Iterable[str] = (), run: str = ""
) -> PageSection:
    """Requested against granted, by kind, and in words where they differ.

    ``run`` names the run where a page has several.
    """
    listed = list(rows)
    tiers = list(dict.fromkeys(tier for row in listed for tier in row.tiers))
    bars = "".join(
        f"<div>{escaped(row.kind)} <span class='dim'>{escaped(row.policy)}</span>"
        f"{share_bar({t: float(n) for t, n in row.tiers.items()}, tiers)}</div>"
        for row in listed
    )
    table = html_table(
        ("kind", "policy", "requested", "granted by node"),
        [
            (
                row.kind,
                row.policy,
                format_bytes(row.requested_bytes),
                ", ".join(f"{node}: {format_bytes(n)}" for node, n in row.granted.items()),
            )
            for row in listed
        ],
        right=("requested",),
    )
    how = "pages of simulated nodes" if simulated else "asked from the pages"
    said = "".join(paragraph(f"{note}.", "dim") for note in notes)
    body = legend(tiers) + bars + table + said
    return PageSection(_of(run, "Requested against granted, at the peak"), body, how)


def measured_section(
    rates: Mapping[str, Mapping[str, float | None]], *, notes: Iterable[str] = ()
) -> PageSection:
    """Tokens/s of every phase by how they were found: ``{"decode": {"measured": 3.1}}``."""
    ways = list(dict.fromkeys(way for each in rates.values() for way in each))
    rows = [
        (phase, *("-" if (rate := each.get(way)) is None else format_number(rate) for way in ways))
        for phase, each in rates.items()
    ]
    table = html_table(("tokens/s", *ways), rows, right=ways)
    title = "Predicted against measured" if "predicted" in ways else "Speed"
    said = "".join(paragraph(f"{note}.", "dim") for note in notes)
    return PageSection(title, table + said, ", ".join(ways))


def timeline_section(timeline: Timeline, *, run: str = "") -> PageSection:
    """What each queue did when in the first steps of decode; in all steps where nothing decodes.

    Words below the picture say what it leaves out. ``run`` names the run where a page has several.
    """
    events = timeline.trace.events
    decode = sorted({event.step for event in events if event.phase == "decode"})
    steps = decode[:DRAWN_STEPS] or sorted({event.step for event in events})
    shown = set(steps)
    bars = [
        LaneBar(event.queue, event.tensor_kind, float(begin), float(end))
        for event, begin, end in zip(events, timeline.starts_s, timeline.ends_s, strict=True)
        if event.step in shown
    ]
    what = "Timeline of the first steps of decode" if decode else "Timeline"
    said = _left_out(timeline, steps, bars)
    return PageSection(_of(run, what), lanes(bars) + said, "simulated")


def _left_out(timeline: Timeline, steps: Sequence[int], bars: Sequence[LaneBar]) -> str:
    """How much of the replay, and of the run that was replayed, a picture of these steps is."""
    events = timeline.trace.events
    total = len({event.step for event in events})
    seconds = max(bar.end for bar in bars) - min(bar.start for bar in bars)
    if len(steps) == total:
        said = f"All that was replayed: {len(bars):,} copies and computations"
        said += f" in {format_seconds(seconds)}."
        if any(event.phase == "optimizer" for event in events):
            said += " Of the passes of a training step at most the first two are replayed."
    else:
        said = (
            f"{len(steps):,} of {total:,} steps are drawn: {len(bars):,} of {len(events):,} copies "
            f"and computations, {format_seconds(seconds)} of {format_seconds(timeline.seconds)}. "
            "A step ends when all queues have done their part, as for one layer of one token."
        )
    return paragraph(f"{said} Bars of one kind that almost touch are drawn as one.", "dim")


def _of(run: str, title: str) -> str:
    return f"{title}: {run}" if run else title


def profile_sections(profile: Profile) -> list[PageSection]:
    """Bandwidth by threads, latency under load, and interleaves of a profile."""
    how = "measured" if profile.measured else "simulated"
    bandwidth, loaded = {}, {}
    for path in profile.paths:
        name = f"CPUs {path.initiator} on node {path.node}"
        for curve in path.curves:
            bandwidth[f"{name}, {curve.kind}, {curve.pages}"] = [
                (float(p.threads), p.bandwidth_bytes_per_s.median / GB) for p in curve.points
            ]
        for load in path.loaded:
            loaded[f"{name}, {load.threads} threads"] = sorted(
                (p.bandwidth_bytes_per_s / GB, p.latency_ns.median) for p in load.points
            )
    mixed = {
        f"CPUs {sweep.initiator} on nodes {', '.join(map(str, sweep.nodes))}": sorted(
            (
                100 * p.weights.get(sweep.nodes[0], 0) / max(sum(p.weights.values()), 1),
                p.bandwidth_bytes_per_s.median / GB,
            )
            for p in sweep.points
        )
        for sweep in profile.sweeps
    }
    idle = [
        (f"{path.initiator} -> {path.node}", each.pages, f"{each.latency_ns.median:.1f}")
        for path in profile.paths
        for each in path.latencies
    ]
    table = html_table(("CPUs -> memory", "pages", "idle latency, ns"), idle)
    notes = "".join(paragraph(note, "dim") for note in profile.notes)
    chart = line_chart(bandwidth, x_label="threads", y_label="GB/s")
    waits = line_chart(loaded, x_label="GB/s", y_label="ns a load")
    shares = line_chart(mixed, x_label="% of pages on the first node", y_label="GB/s")
    return [
        PageSection("Idle latency", table + notes, how),
        PageSection("Bandwidth by threads", chart, how),
        PageSection("Latency under load", waits, how),
        PageSection("Weighted interleaves", shares, how),
    ]
