"""benchmarks/bench_flexgen.py on a tiny model: with a neighbour every case is measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, bench_flexgen
from benchmarks.flexgen_report import falls, phase_result
from benchmarks.neighbour import BESIDE, QUIET
from benchmarks.results import rows_of
from cxl_offload.integrations.flexgen import OptShape

SIZE = ["--rows", "4", "--prompt-len", "6", "--gen-len", "3", "--rounds", "2"]
CASE = "all on the host"
OF_ITS_OWN = pytest.mark.slow(reason="starts stock FlexGen in a process of its own")


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str, status: int = 0) -> Any:
    """The document of a quick run, which is asked for next to nothing, or for too much."""
    least = 1e-9 if status == 0 else 1e9
    monkeypatch.setitem(bars.ASKED, "flexgen", (bars.Asked(".*", ".*", least),))
    file = folder / "flexgen.json"
    monkeypatch.setattr(bench_flexgen, "SHAPE", OptShape(layers=2, hidden=64, heads=4))
    monkeypatch.setattr(bench_flexgen, "LEAST_EQUAL", 0.5)  # of twelve tokens
    asked = [*SIZE, "--cases", CASE, "--json", str(file), *options]
    monkeypatch.setattr(sys, "argv", ["bench_flexgen", *asked])
    assert bench_flexgen.main() == status
    return json.loads(file.read_text())


@OF_ITS_OWN
def test_a_neighbour_is_there_in_half_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run(tmp_path, monkeypatch, "--neighbour")
    [result] = document["results"]
    for phase in ("prefill", "decode"):
        seconds = result[phase]["seconds"]
        assert list(seconds) == [QUIET, BESIDE]
        assert {len(each) for sides in seconds.values() for each in sides.values()} == {2}
    neighbour = document["neighbour"]
    assert neighbour["did"]["copied_bytes_per_s"] > 0
    # it works while the runs beside it are timed, and little longer
    timed = sum(
        sum(each)
        for phase in ("prefill", "decode")
        for each in result[phase]["seconds"][BESIDE].values()
    )
    assert neighbour["did"]["seconds"] >= timed
    assert set(neighbour["cases"]) == {f"{CASE}, 4 x 6: prefill", f"{CASE}, 4 x 6: decode"}
    assert "stock's fall" in capsys.readouterr().out
    assert sum(row.case.endswith("beside a neighbour") for row in rows_of("flexgen", document)) == 4


@OF_ITS_OWN
def test_no_neighbour_is_there_where_none_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = run(tmp_path, monkeypatch, status=1)
    assert "neighbour" not in document
    assert list(document["results"][0]["decode"]["seconds"]) == [QUIET]


def test_rates_and_falls_are_those_of_the_seconds() -> None:
    seconds = {
        QUIET: {"stock": [2.0, 4.0, 3.0], "cxl_offload": [1.0, 2.0, 1.5]},
        BESIDE: {"stock": [4.0, 8.0, 6.0], "cxl_offload": [3.0, 6.0, 4.5]},
    }
    result = phase_result(seconds, 30)
    assert result["stock_tokens_per_s"] == 10
    assert result["cxl_offload_tokens_per_s"] == 20
    assert result["ratio"]["median"] == 2
    [found] = falls([{"case": "a case", "decode": result}]).values()
    assert found.beside.median == pytest.approx(4 / 3)
    assert found.falls.median == pytest.approx(2 / 3)
