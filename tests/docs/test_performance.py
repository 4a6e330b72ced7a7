"""docs/performance.md has the figures of docs/performance.json, the slowest first."""

from __future__ import annotations

import copy
import json
import re
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_all
from benchmarks.markdown_tables import filled
from benchmarks.measurements import INSTRUCTIONS, caches, describe_machine, instructions
from benchmarks.results import READERS, Row

DOCS = Path(__file__).resolve().parents[2] / "docs"


RESULTS = DOCS / "performance.json"


@pytest.fixture
def document() -> Any:
    """A run of two benchmarks, as run_all writes it."""
    rows = [
        Row("linear", "bf16, 1 rows", "read bound", 0.9, 0.89, 0.91),
        Row("linear", "bf16, 1 rows", "torch", 1.5, 1.4, 1.6),
        Row("linear", "bf16, 32 rows", "torch", 0.97, 0.9, 1.02),
        Row("copy", "one copy of 4,096 B", "memcpy", 1.01),
    ]
    runs = [
        {
            "benchmark": name,
            "options": [],
            "seconds": 1.0,
            "status": 0,
            "quiet_before": True,
            "load_before": 0.1,
            "rows": [asdict(row) for row in rows if row.benchmark == name],
        }
        for name in ("linear", "copy")
    ]
    machine = {"date": "2026-01-02T03:04:05", "commit": "abc", "processor": "P", "cores": 2}
    return {
        "kind": "measured",
        "machine": {**machine, "kernel": "6.1", "load_average": [0, 0, 0]},
        "versions": {"torch": "2.13.0"},
        "quick": False,
        "runs": runs,
    }


def test_tables_of_the_page_are_those_of_the_last_run() -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    if not RESULTS.exists():
        assert "Not run in one go on a quiet machine yet." in page
        return
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert filled(page, run_all.tables(found)) == page, (
        "write them anew: python -m benchmarks.run_all --from docs/performance.json "
        "--page docs/performance.md"
    )


def test_every_place_of_the_page_has_its_table(document: Any) -> None:
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    again = filled(page, run_all.tables(document))
    assert "| linear | bf16, 1 rows | torch | 1.50 | 1.40 to 1.60 |" in again
    assert "| versions | torch 2.13.0 |" in again
    assert "No row is slower than its peer." in again


def test_the_machine_is_told_with_memory_caches_and_instructions(
    document: Any, tmp_path: Path
) -> None:
    document["machine"] |= describe_machine()
    told = run_all.tables(document)["run"]
    assert re.search(r"\| memory \| \d+\.\d GiB \|", told)
    for at, (level, kind, size) in enumerate((("1", "Data", "48K"), ("1", "Instruction", "32K"))):
        folder = tmp_path / "cache" / f"index{at}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert caches(tmp_path) == "L1 48K"
    assert caches(tmp_path / "none") == ""
    assert set(instructions().split(", ")) <= {"", *INSTRUCTIONS}


def test_every_benchmark_that_has_a_peer_is_run() -> None:
    assert {each.name for each in run_all.BENCHMARKS} == READERS.keys()


@pytest.mark.parametrize(
    ("row", "slower"),
    [
        (Row("a", "", "torch", 0.9, 0.8, 0.99), True),
        (Row("a", "", "torch", 0.9, 0.8, 1.01), False),
        (Row("a", "", "torch", 0.9), True),
        (Row("a", "", "torch", 1.1), False),
        (Row("a", "", "read bound", 0.9, 0.8, 0.99), False),
    ],
)
def test_slower_is_what_stays_below_a_peer_with_its_whole_interval(row: Row, slower: bool) -> None:
    assert row.slower == slower


def test_a_slower_row_leaves_the_table_of_the_rest_and_stands_first(document: Any) -> None:
    changed = copy.deepcopy(document)
    found = [row for run in changed["runs"] for row in run["rows"]]
    worst = {"ratio": 0.01, "low": 0.005, "high": 0.02, "case": "planted"}
    changed["runs"][0]["rows"][1] |= worst
    made = run_all.tables(changed)
    assert "planted" in made["slower"].splitlines()[2]
    assert "planted" not in made["rows"] + made["bounds"]
    lines = sum(len(made[name].splitlines()) - 2 for name in ("slower", "rows", "bounds"))
    assert lines == len(found)


def test_a_benchmark_without_figures_and_a_busy_machine_are_named(document: Any) -> None:
    changed = copy.deepcopy(document)
    changed["runs"][0]["rows"] = []
    changed["runs"][1]["quiet_before"] = False
    told = run_all.tables(changed)["run"]
    assert f"| failed | {changed['runs'][0]['benchmark']} |" in told
    busy = next(line for line in told.splitlines() if line.startswith("| not quiet before"))
    assert changed["runs"][1]["benchmark"] in busy


def line_of(document: Any, key: str) -> list[str]:
    """The names that the table of the run has beside a key."""
    told = run_all.tables(document)["run"]
    line = next(line for line in told.splitlines() if line.startswith(f"| {key} |"))
    return line.split("|")[2].strip().split(", ")


def test_benchmarks_that_are_not_in_the_run_are_named(document: Any) -> None:
    run, not_run = line_of(document, "run"), line_of(document, "not run")
    assert run == ["linear", "copy"]
    assert not {*run} & {*not_run}
    assert {*run, *not_run} == {each.label for each in run_all.BENCHMARKS}
    assert len(run) + len(not_run) == len(run_all.BENCHMARKS)


def test_a_benchmark_of_one_name_does_not_stand_for_the_other(document: Any) -> None:
    document["runs"][1] |= {"benchmark": "attention", "options": ["--rounds", "7"]}
    assert "attention --peers vLLM" in line_of(document, "not run")
    document["runs"][1]["options"] = ["--peers", "vLLM", "--rounds", "7"]
    assert "attention --peers vLLM" in line_of(document, "run")
    assert "attention" in line_of(document, "not run")


def test_a_run_of_all_benchmarks_says_that_none_is_missing(document: Any) -> None:
    document["runs"] = [
        {**document["runs"][0], "benchmark": each.name, "options": [*each.options, *each.quick]}
        for each in run_all.BENCHMARKS
    ]
    assert line_of(document, "not run") == ["none"]


def test_a_benchmark_that_missed_a_bar_is_named(document: Any) -> None:
    assert line_of(document, "missed a bar") == line_of(document, "failed") == ["none"]
    document["runs"][0]["status"] = 1
    assert line_of(document, "missed a bar") == ["linear"]
    assert line_of(document, "failed") == ["none"]


@pytest.mark.parametrize("status", [2, -9, 139, "no such file"])
def test_a_benchmark_that_failed_has_not_missed_a_bar(document: Any, status: object) -> None:
    document["runs"][0]["status"] = status
    assert line_of(document, "failed") == ["linear"]
    assert line_of(document, "missed a bar") == ["none"]


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(0.85, "0.85"), (0.994, "0.99"), (0.998, "0.998"), (0.99996, "0.99996"), (1.0, "1.00")],
)
def test_what_is_slower_does_not_read_as_equal(document: Any, ratio: float, told: str) -> None:
    document["runs"][0]["rows"][1] |= {"ratio": ratio, "low": ratio, "high": ratio}
    assert f"| {told} | {told} to {told} |" in "".join(run_all.tables(document).values())


def with_metadata(folder: Path, number: str) -> None:
    about = folder / f"vllm-{number}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


def test_the_version_of_vllm_is_that_of_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    with_metadata(tmp_path / "here", "1.2.3")
    monkeypatch.syspath_prepend(tmp_path / "here")
    assert run_all.versions()["vllm"] == "1.2.3"
    with_metadata(tmp_path / "there", "98.7")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "there"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = run_all.versions()
    assert found["vllm"] == "98.7"
    assert found["torch"] == version("torch")


def test_no_version_of_vllm_is_told_where_its_environment_is_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert run_all.version_elsewhere("vllm", ".venv-vllm") == ""


def test_waiting_for_quiet_ends_when_others_never_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(run_all.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(run_all.time, "sleep", lambda _: None)
    monkeypatch.setattr(run_all, "all_busy_s", lambda: 0.5 * next(clock))
    assert not run_all.wait_for_quiet(60)
    monkeypatch.setattr(run_all, "all_busy_s", lambda: 7.0)
    assert run_all.wait_for_quiet(60)


def test_the_grid_and_the_neighbour_reach_the_benchmarks_that_have_them() -> None:
    labels = [each.label for each in run_all.in_order(list(READERS), grid=True)]
    grids = {"flexgen --grid", "zero_offload --grid", "vllm_kv --grid"}
    assert grids == {each for each in labels if "--grid" in each}
    assert len(labels) == len(run_all.in_order(list(READERS))) + len(grids)
    for each in run_all.BENCHMARKS:
        command = each.command(quick=True, result=Path("r.json"), neighbour=True)
        assert ("--neighbour" in command) == (each.name in ("flexgen", "zero_offload", "vllm_kv"))
        assert command[-2:] == ["--json", "r.json"]
        assert "--neighbour" not in each.command(quick=True, result=Path("r.json"))


def test_a_grid_does_not_stand_for_the_other_sizes(document: Any) -> None:
    document["runs"][0] |= {"benchmark": "flexgen", "options": ["--grid", "--neighbour"]}
    assert "flexgen --grid" in line_of(document, "run")
    assert "flexgen" in line_of(document, "not run")


def test_benchmarks_run_in_the_order_in_which_they_were_asked_for() -> None:
    asked = run_all.in_order(["plan", "attention", "flexgen"])
    assert [each.name for each in asked] == ["plan", "attention", "attention", "flexgen"]
    assert [each.environment for each in asked[1:3]] == ["", ".venv-vllm"]
    assert {each.name for each in run_all.in_order(list(READERS))} == set(READERS)
