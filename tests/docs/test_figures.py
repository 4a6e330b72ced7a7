"""The papers' figures: published points are those of the package, page and pictures are current."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import figures
from benchmarks.figure_page import with_tables
from benchmarks.figure_parts import Paper, Point

from .blocks import ROOT

PAGE = ROOT / "docs/figures.md"
PICTURES = ROOT / "docs/pictures"
MOST_BYTES = 120_000
PAPERS = list(figures.PAPERS.values())


def numbers(value: object) -> Iterator[float]:
    """All numbers of a piece of JSON or YAML; of a text such as ``31 %`` its first."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"^[\d.]+", value))
    elif value is not None:
        yield float(value)  # type: ignore[arg-type]


@cache
def cases() -> list[dict[str, Any]]:
    files = (ROOT / "cxl_offload/validation/cases").glob("*.json")
    return [one for file in files for one in json.loads(file.read_text())]


@cache
def facts(machine: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(
        (ROOT / f"configs/machines/{machine}.yaml").read_text()
    )["facts"]
    return found


def published_in(held: str) -> list[float]:
    """What the file itself says there; fractions count as per cent too."""
    if held.startswith("case "):
        (entry,) = (one for one in cases() if one["id"] == held[5:])
        found = [*numbers(entry["expected"]), *numbers(entry.get("printed"))]
    else:
        machine, _, fact = held.partition(": ")
        (entry,) = (one for one in facts(machine) if one["name"] == fact)
        found = list(numbers(entry["value"]))
    return [*found, *(100 * each for each in found)]


@pytest.mark.slow(reason="computes every figure")
@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_published_points_are_the_numbers_of_cases_and_machine_files(paper: Paper) -> None:
    for one in paper.points():
        known = published_in(one.held)
        if one.held.endswith("lowest_cxl_share_ratio"):
            known += published_in(one.held.replace("lowest", "highest"))
        for number in (one.low, one.high):
            assert any(number == pytest.approx(each, rel=1e-12) for each in known), one


def test_every_paper_has_points_and_curves_that_say_what_they_are() -> None:
    assert len(PAPERS) == 5
    for paper in PAPERS:
        assert paper.points(), paper.name
        for panel in paper.panels():
            assert all(curve.kind in ("predicted", "simulated") for curve in panel.curves)
            assert all(len(curve.x) == len(curve.y) > 1 for curve in panel.curves)


def test_error_is_the_distance_from_what_is_published() -> None:
    one = Point("a", 0, low=2, high=4, predicted=3, unit="", where="", held="")
    assert one.error == 0
    assert replace(one, predicted=5).error == pytest.approx(0.25)
    assert replace(one, predicted=1).error == pytest.approx(-0.5)
    assert replace(one, predicted=1, bound="at most").error == 0
    assert replace(one, predicted=6, bound="at least").error == 0
    assert replace(one, predicted=1, bound="at least").error == pytest.approx(-0.5)


def test_tables_of_the_page_are_what_is_computed() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, PAPERS) == page, (
        "write them anew: python -m benchmarks.figures --page docs/figures.md"
    )


@pytest.mark.parametrize(("name", "other"), [("caption", "worst"), ("caption", "captain")])
def test_page_whose_places_are_not_the_tables_is_refused(name: str, other: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=other):
        with_tables(page.replace(f"table: {name} ", f"table: {other} "), PAPERS)
    with pytest.raises(ValueError, match=f"no place for {name!r}"):
        with_tables(page.replace(f"table: {name} ", "list: "), PAPERS)


def test_pictures_show_the_numbers_that_are_computed() -> None:
    image = pytest.importorskip("PIL.Image", reason="matplotlib brings Pillow, to read pictures")
    drawing = pytest.importorskip("benchmarks.figure_drawing")
    wanted = {f"paper-{each.name}": drawing.fingerprint(drawing.drawn(each)) for each in PAPERS}
    wanted["papers"] = drawing.fingerprint(drawing.ratios(PAPERS))
    kept = {}
    for name in wanted:
        file = PICTURES / f"{name}.png"
        assert file.stat().st_size < MOST_BYTES, file
        assert f"](pictures/{file.name})" in PAGE.read_text(encoding="utf-8")
        with image.open(file) as picture:
            kept[name] = picture.text["Description"]
    assert kept == wanted, "draw them again: python -m benchmarks.figures --out docs/pictures"


def test_legend_says_predicted_simulated_and_published() -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, an optional dependency")
    from matplotlib.figure import Figure

    from benchmarks.figure_drawing import draw_panel

    for panel in (panel for paper in PAPERS for panel in paper.panels()):
        axes = Figure().subplots()
        draw_panel(axes, panel)
        said = " ".join(text.get_text() for text in axes.get_legend().get_texts())
        shown = {curve.kind for curve in panel.curves}
        if panel.rows:
            shown |= {one.kind for one in panel.points}
        assert all(kind in said for kind in {*shown, "published"}), panel.title


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["MPLCONFIGDIR"] = str(folder)
    command = [sys.executable, "-m", "benchmarks.figures", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_one_paper_is_drawn_without_a_display(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, an optional dependency")
    out, file = tmp_path / "new/pictures", tmp_path / "numbers.json"
    done = run(["topology", "--out", str(out), "--json", str(file)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("topology: 2 of 2 within 10%")
    assert [each.name for each in out.iterdir()] == ["paper-topology.png"]
    assert (out / "paper-topology.png").read_bytes().startswith(b"\x89PNG")
    document: dict[str, Any] = json.loads(file.read_text())
    panels = document["topology"]["panels"]
    assert {curve["kind"] for panel in panels for curve in panel["curves"]} == {"predicted"}
    assert [panel["points"][0]["held"] for panel in panels] == ["case 002-TCO-ratio"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "pictures"], "--out needs matplotlib; install it"),
        (["capton"], "no paper is called 'capton'; there are use-cases, bandwidth, topology"),
        (["caption", "--page", "x.md"], "--page writes the tables of all papers"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_any_work(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["figures", *arguments])
    with pytest.raises(SystemExit) as ended:
        figures.main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not shown.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--page", "/dev/full"], "is a device"),
        (["--page", "nowhere.md"], "nowhere.md"),
        (["--json", "nowhere/numbers.json"], "nowhere/numbers.json"),
    ],
)
def test_file_that_cannot_be_used_is_one_line(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["figures", *given])
    monkeypatch.setattr(figures, "PAPERS", {"caption": figures.PAPERS["caption"]})
    with pytest.raises(SystemExit) as ended:
        figures.main()
    assert message in str(ended.value.code)
    assert len(str(ended.value.code).splitlines()) == 1
