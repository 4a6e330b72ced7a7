from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cxl_offload.cli import tco, validate
from cxl_offload.validation import PUBLISHED_CASES, SHIPPED

EXAMPLE = ["tco", "--rl-d", "0.1", "--rl-c", "0.125", "--c", "2", "--r-t", "1.1"]
runner = CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    tco.register(made)
    validate.register(made)
    return made


def test_validate_json_has_one_entry_a_case_and_nothing_else(app: typer.Typer) -> None:
    done = runner.invoke(app, ["validate", str(PUBLISHED_CASES), "--json"])
    entries = json.loads(done.stdout)["cases"]
    published = json.loads(PUBLISHED_CASES.read_text(encoding="utf-8"))
    assert done.exit_code == 0
    assert [entry["id"] for entry in entries] == [case["id"] for case in published]
    assert all(isinstance(entry["pass"], bool) for entry in entries)


def test_validate_answers_all_shipped_cases_and_says_how_far_plans_are_off(
    app: typer.Typer,
) -> None:
    done = runner.invoke(app, ["validate", "--json"])
    found = json.loads(done.stdout)
    shipped = [json.loads(file.read_text(encoding="utf-8")) for file in SHIPPED]
    ids = [case["id"] for cases in shipped for case in cases]
    assert [entry["id"] for entry in found["cases"]] == ids
    assert len(shipped[0]) == 113
    ratios = {
        entry["id"]: max(entry["predicted"] / value, value / entry["predicted"])
        for entry in found["cases"]
        if entry["id"].startswith(
            ("plan-vllm", "plan-lmdeploy", "plan-flexgen", "plan-zero-offload")
        )
        and isinstance(value := entry["expected"], int | float)
    }
    assert found["absolute"]["cases"] == len(ratios)
    assert found["absolute"]["worst_id"] == max(ratios, key=lambda name: ratios[name])
    printed = runner.invoke(app, ["validate", "--failed"], env={"COLUMNS": "200"}).stdout
    assert f"Plans against {len(ratios)} published absolute results: off by" in printed
    assert f"at worst ({found['absolute']['worst_id']}); 0 by more than 1.4x" in printed


def test_validate_prints_rates_by_use_and_by_model(app: typer.Typer) -> None:
    done = runner.invoke(app, ["validate", str(PUBLISHED_CASES), "--failed"])
    assert done.exit_code == 0
    assert "Pass rates by use" in done.stdout
    assert "Pass rates by model" in done.stdout
    assert "zero_offload_step" in done.stdout


def test_validate_strict_fails_on_a_failing_case(app: typer.Typer, tmp_path: Path) -> None:
    case = json.loads(PUBLISHED_CASES.read_text(encoding="utf-8"))[0]
    case["expected"]["value"] *= 2
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps([case]), encoding="utf-8")
    assert runner.invoke(app, ["validate", str(wrong)]).exit_code == 0
    assert runner.invoke(app, ["validate", str(wrong), "--strict"]).exit_code == 1


def test_validate_of_no_cases_prints_empty_rates(app: typer.Typer, tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("[]", encoding="utf-8")
    assert runner.invoke(app, ["validate", str(empty)]).exit_code == 0
    assert json.loads(runner.invoke(app, ["validate", str(empty), "--json"]).stdout) == {
        "version": 1,
        "cases": [],
    }


def test_validate_refuses_to_list_only_failures_as_json() -> None:
    from cxl_offload.cli.main import app as whole

    done = runner.invoke(whole, ["validate", str(PUBLISHED_CASES), "--failed", "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--failed: --json says of each case whether it passes" in done.stderr


def test_validate_plot_writes_a_picture(app: typer.Typer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, an optional dependency")
    picture = tmp_path / "accuracy.png"
    done = runner.invoke(app, ["validate", str(PUBLISHED_CASES), "--json", "--plot", str(picture)])
    assert done.exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tco_json_has_the_printed_and_the_corrected_forms(app: typer.Typer) -> None:
    threads = ["--n-threads", "12", "--n-congest", "8"]
    fleet = ["--n-baseline", "100", "--server-cost", "5000", "--d", "1", "--w", "1000"]
    done = runner.invoke(app, [*EXAMPLE, *threads, *fleet, "--json"])
    found = json.loads(done.stdout)
    assert list(found) == ["version", "printed", "corrected", "corrected, congestion"]
    printed = found["printed"]
    assert printed["saving"] == pytest.approx(0.276712, abs=1e-6)
    assert printed["time_cxl"] == pytest.approx(printed["time_baseline"])
    assert printed["cost_cxl"] / printed["cost_baseline"] == pytest.approx(1 - printed["saving"])


def test_tco_without_threads_has_the_form_that_needs_none(app: typer.Typer) -> None:
    done = runner.invoke(app, [*EXAMPLE, "--json"])
    assert list(json.loads(done.stdout)) == ["version", "corrected"]
    table = runner.invoke(app, EXAMPLE)
    assert table.exit_code == 0
    assert "break-even cost of a server with CXL" in table.stdout


_PLANS = ["--r-t", "1.1", "--without", "a.yaml", "--having", "b.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            ([*_PLANS, option, "0.5"], f"{option} 0.5: two plans say the ratio; leave it out")
            for option in ("--rl-d", "--rl-c", "--c", "--n-threads", "--n-congest", "--d", "--w")
        ),
        ([*EXAMPLE[1:], "--without", "a.yaml"], "--without: does nothing without --having"),
        ([*EXAMPLE[1:], "--having", "b.yaml"], "--having: does nothing without --without"),
        ([*EXAMPLE[1:], "--n-threads", "12"], "--n-threads: does nothing without --n-congest"),
        ([*EXAMPLE[1:], "--n-congest", "8"], "--n-congest: does nothing without --n-threads"),
        ([*EXAMPLE[1:], "--server-cost", "5"], "--server-cost: the cost of no number of servers"),
        ([*_PLANS, "--server-cost", "5"], "--server-cost: the cost of no number of servers"),
        ([*EXAMPLE[1:], "--d", "1"], "--d: does nothing without --w and --n-baseline"),
        (
            [*EXAMPLE[1:], "--w", "9", "--n-baseline", "2"],
            "--w: does nothing without --d; give all",
        ),
    ],
)
def test_tco_refuses_an_option_that_changes_no_figure(words: list[str], said: str) -> None:
    from cxl_offload.cli.main import app as whole

    done = runner.invoke(whole, ["tco", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rl-d", "0.1", "--rl-c", "1.5", "--c", "2", "--r-t", "1.1"],
        ["--rl-d", "2", "--rl-c", "0.2", "--c", "2", "--r-t", "1.1"],
        [*EXAMPLE[1:], "--n-baseline", "10", "--d", "100", "--w", "500"],
    ],
)
def test_tco_refuses_what_the_model_says_nothing_about(wrong: list[str]) -> None:
    """It printed negative times, and savings of -780 %."""
    from cxl_offload.cli.main import app as whole

    done = runner.invoke(whole, ["tco", *wrong])
    assert done.exit_code == 2
    assert "tco:" in done.output
