"""Pages: what they hold, that names stay text, and that nothing is asked from a network."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.plan.plan_file import Plan, load_plan
from cxl_offload.plan.replay_check import ReplayCheck
from cxl_offload.profile.curves import (
    BandwidthCurve,
    BandwidthPoint,
    Estimate,
    InterleavePoint,
    InterleaveSweep,
    LoadedCurve,
    LoadedPoint,
)
from cxl_offload.profile.model import Fingerprint, PathProfile, Profile
from cxl_offload.report import (
    findings_section,
    machine_section,
    made_now,
    measured_section,
    placement_section,
    plan_sections,
    profile_sections,
    render_page,
    timeline_section,
    what_if_section,
)
from cxl_offload.report.charts import TIER_COLOURS, LaneBar, lanes, line_chart, share_bar
from cxl_offload.report.page import paragraph
from cxl_offload.sim import Event, Timeline, Trace, replay
from cxl_offload.topology import load_machine, machine_names
from cxl_offload.topology.hazards import Hazard
from cxl_offload.units import format_seconds

HOSTILE = '"><script>alert(1)</script><img src=http://x.example/ onerror=alert(2)>\x00\u202e&'
EMPTY = {"meta", "br", "wbr", "img"}


class Reader(HTMLParser):
    """Elements, attributes and text of a page; elements must close in the order they open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_alone(page: str) -> Reader:
    """Well-formed, without scripts, and without anything that a browser would fetch."""
    read = Reader(page)
    assert not {tag for tag, _ in read.elements} & {"script", "img", "iframe", "object", "link"}
    for _, attributes in read.elements:
        assert not {name for name in attributes if name in ("src", "href") or name[:2] == "on"}
    assert "url(" not in page
    assert "@import" not in page
    assert {"http-equiv": "Content-Security-Policy"}.items() <= {
        key: value for tag, each in read.elements if tag == "meta" for key, value in each.items()
    }.items()
    return read


@dataclass
class Row:
    """A row of a run's placement."""

    kind: str
    policy: str
    requested_bytes: int
    granted: dict[int, int] = field(default_factory=dict)
    tiers: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    file = tmp_path_factory.mktemp("plan") / "plan.yaml"
    words = ["--model", "opt-1.3b", "--machine", "epyc9354-cxl-a", "--output", str(file)]
    made = CliRunner().invoke(app, ["plan", "inference", "--executor", "flexgen", *words])
    assert made.exit_code == 0, made.stderr
    return load_plan(file)


def test_names_from_files_are_only_ever_text(plan: Plan) -> None:
    machine = replace(
        load_machine("epyc9354-cxl-a"), name=HOSTILE, description=HOSTILE, notes=(HOSTILE,)
    )
    gpus = tuple(replace(gpu, model=HOSTILE) for gpu in machine.gpus)
    homes = tuple(replace(home, kind=home.kind + HOSTILE, policy=HOSTILE) for home in plan.homes)
    strange = replace(plan, model=HOSTILE, machine=HOSTILE, notes=(HOSTILE,), homes=homes)
    sections = [
        machine_section(replace(machine, gpus=gpus)),
        findings_section([Hazard(HOSTILE, "error", HOSTILE, HOSTILE, HOSTILE, HOSTILE)]),
        *plan_sections(strange),
        what_if_section(strange, HOSTILE, HOSTILE),
        placement_section([Row(HOSTILE, HOSTILE, 1, {0: 1}, {HOSTILE: 1})], simulated=True),
        measured_section({HOSTILE: {HOSTILE: 1.0}}),
    ]
    read = check_alone(render_page(HOSTILE, HOSTILE, sections))
    assert read.text.count("<script>alert(1)</script>") > 10
    assert "\x00" not in read.text
    assert "\u202e" not in read.text


@pytest.mark.parametrize("name", machine_names())
def test_picture_has_every_node_and_gpu_once(name: str) -> None:
    machine = load_machine(name)
    section = machine_section(machine)
    read = check_alone(render_page(name, "", [section]))
    for node in machine.nodes:
        assert len(re.findall(rf"node {node.id}: ", read.text)) == 1
    boxes = [each for tag, each in read.elements if tag == "rect"]
    assert len(boxes) == len(machine.nodes) + len(machine.gpus)
    places = {(box["x"], box["y"]) for box in boxes}
    assert len(places) == len(boxes)


def test_picture_says_what_the_cpus_of_the_initiator_reach() -> None:
    machine = load_machine("epyc9354-cxl-a")
    text = Reader(machine_section(machine).body).text
    assert "38.4 GB/s · 292 ns" in text
    assert "to it 25 GB/s" in text
    assert "from it 25 GB/s" in text


def test_shares_of_a_bar_are_those_of_the_bytes() -> None:
    bar = share_bar({"ldram": 3.0, "cxl": 1.0}, ["ldram", "cxl"])
    assert re.findall(r"width:([\d.]+)%", bar) == ["75.000", "25.000"]
    assert share_bar({"cxl": 0.0}, ["cxl"]) == ""
    assert re.findall(r"width:([\d.]+)%", share_bar({"a": 1.0}, ["a"], 8.0)) == ["12.500"]


def test_points_of_a_chart_keep_their_order_and_proportion() -> None:
    chart = line_chart({"a": [(0, 0), (5, 50), (10, 100)]}, x_label="x", y_label="y")
    dots = [each for tag, each in Reader(chart).elements if tag == "circle"]
    x = [float(str(each["cx"])) for each in dots]
    y = [float(str(each["cy"])) for each in dots]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert y[0] > y[2]
    assert line_chart({}, x_label="x", y_label="y") == ""


def test_page_of_a_plan_has_its_figures_its_timeline_and_one_more_card(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    words = ["plan", "inference", "--model", "opt-1.3b", "--machine", "epyc9354-cxl-a", "--json"]
    plain = CliRunner().invoke(app, [*words, "--executor", "flexgen"])
    made = CliRunner().invoke(app, [*words, "--executor", "flexgen", "--report", str(file)])
    assert (made.exit_code, made.stdout) == (0, plain.stdout)
    read = check_alone(file.read_text())
    for title in ("Machine epyc9354-cxl-a", "Where every kind", "With one more card (cxl=128GiB"):
        assert title in read.text
    assert "Timeline of the first steps of decode" in read.text
    assert re.search(r"\d of \d+ steps are drawn: \d+ of [\d,]+ copies", read.text)
    assert "predicted" in read.text
    assert "simulated" in read.text


def replayed(steps: int, phase: str = "decode", *, repeats: int = 1) -> Timeline:
    """Of every step ``repeats`` copies, back to back, and one computation."""
    copy = Event(phase, 0, "load_weight", "h2d", "weights", {0: 1 << 20}, {})
    work = Event(phase, 0, "compute", "cpu", "kv", {0: 1 << 20}, {})
    trace = Trace()
    for step in range(steps):
        trace.extend([replace(copy, step=step)] * repeats)
        trace.append(replace(work, step=step))
    return replay(trace, load_machine("epyc9354-cxl-a"))


def test_timeline_says_how_much_of_the_replay_it_leaves_out() -> None:
    timeline = replayed(30, repeats=4)
    section = timeline_section(timeline, run="system A, by kind")
    assert section.title == "Timeline of the first steps of decode: system A, by kind"
    text = Reader(section.body).text
    assert "12 of 30 steps are drawn: 60 of 150 copies and computations" in text
    assert f"of {format_seconds(timeline.seconds)}." in text
    whole = Reader(timeline_section(replayed(3)).body).text
    assert "All that was replayed: 6 copies and computations" in whole
    assert "first two" in Reader(timeline_section(replayed(3, "optimizer")).body).text


def test_timeline_of_very_many_copies_loses_none_of_the_time_that_they_took() -> None:
    """Only the first 4000 bars were drawn, and nothing said so."""
    timeline = replayed(1, repeats=6000)
    read = Reader(timeline_section(timeline).body)
    bars = [each for tag, each in read.elements if tag == "rect"]
    assert len(bars) < 100
    last = max(float(str(bar["x"])) + float(str(bar["width"])) for bar in bars)
    assert last == pytest.approx(760, abs=1)
    assert "6,001 copies and computations" in read.text


@pytest.mark.parametrize(("gap", "drawn"), [(0.0, 1), (0.2, 1), (3.0, 2)])
def test_bars_are_joined_where_nobody_could_see_a_gap(gap: float, drawn: int) -> None:
    pixel = 1 / 644  # of a picture of one second
    bars = [
        LaneBar("a", "kv", 0.0, 0.5),
        LaneBar("a", "kv", 0.5 + gap * pixel, 1.0),
        LaneBar("b", "kv", 0.0, 1.0),
        LaneBar("a", "act", 0.5, 0.6),
    ]
    boxes = [tag for tag, _ in Reader(lanes(bars)).elements if tag == "rect"]
    assert len(boxes) == drawn + 2


def test_speeds_are_written_without_exponents_and_with_what_must_be_known() -> None:
    section = measured_section(
        {"prefill": {"simulated": 42870.6}, "decode": {"simulated": 0.5}}, notes=["It is noise"]
    )
    assert "42,870" in section.body
    assert "e+04" not in section.body
    assert "It is noise." in Reader(section.body).text


def test_long_words_of_a_table_may_be_broken_behind_their_signs() -> None:
    section = placement_section(
        [Row("kv", "weighted:ldram=12,cxl=1@16KiB", 1, {0: 1}, {"ldram": 1})],
        simulated=True,
        run="by kind",
    )
    assert "weighted:<wbr>ldram=12,<wbr>cxl=1@<wbr>16KiB" in section.body
    assert section.title == "Requested against granted, at the peak: by kind"


def test_names_that_a_picture_has_no_room_for_end_in_a_sign() -> None:
    machine = load_machine("epyc9354-cxl-a")
    gpus = tuple(replace(gpu, model="N" * 40) for gpu in machine.gpus)
    text = Reader(machine_section(replace(machine, gpus=gpus)).body).text
    assert "N" * 23 + "\u2026" in text
    assert "N" * 24 not in text


def test_page_of_a_machine_and_of_its_findings(tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "machine.html"
    assert runner.invoke(app, ["report", str(file)]).exit_code == 0
    assert "What doctor found" in check_alone(file.read_text()).text
    assert runner.invoke(app, ["report", str(file), "--machine", "gh200"]).exit_code == 0
    assert "What doctor found" not in check_alone(file.read_text()).text
    assert runner.invoke(app, ["doctor", "--report", str(file)]).exit_code == 0
    assert "What doctor found" in check_alone(file.read_text()).text


def test_page_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    made = CliRunner().invoke(
        app, ["plan", "inference", "--model", "opt-1.3b", "--report", str(tmp_path / "no" / "f")]
    )
    assert made.exit_code == 2
    assert "there is no folder" in made.stderr


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


def test_page_of_a_profile_draws_bandwidth_latency_under_load_and_interleaves() -> None:
    curve = BandwidthCurve(
        "load", "base", tuple(BandwidthPoint(n, exactly(n * 1e10)) for n in (1, 2, 4))
    )
    loaded = LoadedCurve(
        "base", 4, tuple(LoadedPoint(0, exactly(100.0 + n), n * 1e10) for n in (3, 1, 2))
    )
    path = PathProfile(0, 2, (0,), 1 << 26, curves=(curve,), loaded=(loaded,))
    mixes = tuple(InterleavePoint({0: a, 2: 4 - a}, exactly(1e10 * a + 1e9)) for a in range(5))
    sweep = InterleaveSweep(0, (0, 2), 4, "base", mixes)
    facts = Fingerprint("cpu", 1, (), "k", 4096, "never", "avx2")
    profile = Profile(
        machine=facts, date="", measured=True, mode="quick", seconds=1.0,
        paths=(path,), sweeps=(sweep,),
    )  # fmt: skip
    sections = {each.title: each for each in profile_sections(profile)}
    dots = {
        title: sum(tag == "circle" for tag, _ in Reader(each.body).elements)
        for title, each in sections.items()
    }
    assert dots["Bandwidth by threads"] == 3
    assert dots["Latency under load"] == 3
    assert dots["Weighted interleaves"] == 5
    waits = Reader(sections["Latency under load"].body)
    xs = [float(str(each["cx"])) for tag, each in waits.elements if tag == "circle"]
    assert xs == sorted(xs)  # a line from idle to loaded, whatever the order of measuring
    assert {each.figures for each in sections.values()} == {"measured"}


def test_what_is_no_tier_has_the_colour_of_none() -> None:
    """Blue was local DRAM in one card of a page, and weights in the next."""
    page = render_page("a", "", [])
    for theme in page.split("@media(prefers-color-scheme:dark)"):
        colours = dict(re.findall(r"--(\w+):(#[0-9a-f]{3,6})\b", theme.partition("*{")[0]))
        tiers = {colours[tier] for tier in TIER_COLOURS}
        others = {colours[f"s{at}"] for at in range(6)} | {colours["plain"]}
        assert len(tiers) == 6
        assert len(others) == 7
        assert not tiers & others


def test_bars_of_one_page_that_are_no_tiers_all_look_alike(plan: Plan) -> None:
    for section in (plan_sections(plan)[2], what_if_section(plan, "cxl=1GiB", plan)):
        bars = re.findall(r'<i style="width:[\d.]+%;background:([^"]+)"', section.body)
        assert len(bars) >= 2
        assert set(bars) == {"var(--plain)"}


def test_commands_and_options_are_broken_at_blanks_only(plan: Plan) -> None:
    (command,) = re.findall(r"<pre>(.*?)</pre>", plan_sections(plan)[0].body)
    assert '<span class="word">--model</span> ' in command
    assert Reader(command).text == shlex.join(plan.command_in("plan.yaml"))
    assert '<span class="word">--max-batches</span> 1' in paragraph("give --max-batches 1")
    assert paragraph("4-bit --- a < b") == "<p>4-bit --- a &lt; b</p>"


def test_sockets_in_another_order_than_nodes_are_explained() -> None:
    assert "numbers that the source prints" in machine_section(load_machine("epyc9354-cxl-a")).body
    machine = load_machine("gh200")
    assert "numbers that the source prints" not in machine_section(machine).body


def test_card_and_single_unit_are_told_apart(plan: Plan) -> None:
    """A GiB more brought nothing, and a card below 8 %: it read as a contradiction."""
    said = what_if_section(plan, "cxl=1GiB", plan).body
    assert "This is a whole card, capacity, bandwidth and all" in said
    assert "of a single GiB or GB/s" in said


def test_page_of_a_plan_says_its_doubts_beside_its_speed(plan: Plan) -> None:
    note = ReplayCheck("decode", 1.0, 1.55).sentence()
    verdict = plan_sections(replace(plan, notes=(*plan.notes, note)))[0].body
    assert "differ by 55 %, see the notes." in verdict.split("</p>")[0]


def test_page_says_what_made_it_and_when() -> None:
    assert re.fullmatch(r"cxl_offload \S+, \d{4}-\d\d-\d\d \d\d:\d\d UTC", made_now())
