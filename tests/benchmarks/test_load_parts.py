"""The parts of a load that benchmarks/bench_load.py prints: timed calls, their shares and rates."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks import bench_load
from benchmarks.large_checkpoint import SMALL, make_checkpoint
from benchmarks.results import rows_of
from cxl_offload import Session
from cxl_offload.integrations.transformers import weight_reads
from cxl_offload.objects.load_parts import AT_ONCE, FAULT_IN, READING, REST, LoadPart

SLOWER_S = 0.02


class Usage(NamedTuple):
    """Of a disk, as far as it is asked."""

    free: int


def slower(call: Any, calls: list[int]) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        calls.append(1)
        time.sleep(SLOWER_S)
        return call(*args, **options)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(made, SMALL, 1 << 20)
    return made


def loaded(folder: Path) -> dict[str, LoadPart]:
    parts: list[bench_load.Parts] = []
    took = bench_load.ours(folder, parts)
    [found] = parts
    seconds = {part.name: part.seconds for part in found}
    assert sum(seconds.values()) - 2 * seconds[AT_ONCE] == pytest.approx(took)
    return {part.name: part for part in found}


def test_parts_are_all_of_a_load(folder: Path) -> None:
    found = loaded(folder)
    assert list(found) == [FAULT_IN, READING, AT_ONCE, REST]
    assert min(found[each].seconds for each in (FAULT_IN, READING, REST)) > 0
    weights_bytes = make_checkpoint(folder, SMALL, 1 << 20)
    assert [part.nbytes for part in found.values()] == [weights_bytes, weights_bytes, 0, 0]


@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [(Session, "allocate", FAULT_IN), (weight_reads, "copy_whole", READING)],
)
def test_a_slower_call_lengthens_its_part_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, part: str
) -> None:
    before, calls = loaded(folder), list[int]()
    monkeypatch.setattr(owner, name, slower(getattr(owner, name), calls))
    found = loaded(folder)
    added = SLOWER_S * len(calls)
    assert calls
    assert found[part].seconds >= added
    others = [each for each in (FAULT_IN, READING) if each != part]
    assert all(found[each].seconds < before[each].seconds + added / 2 for each in others)


def test_parts_are_printed_with_their_share_and_rate() -> None:
    def of(factor: int) -> list[Any]:
        parts = LoadPart(FAULT_IN, 0.5 * factor, 10**9), LoadPart(READING, factor, 10**9)
        return [part.to_json() for part in (*parts, LoadPart(REST, 0.5 * factor))]

    whole = {"ours": [2.0, 4.0, 4.0]}
    rows = [{"case": "a load", "parts": [of(1), of(2), of(2)], "seconds": whole}]
    rows.append({"case": "no load", "seconds": whole})
    told = bench_load.printed_parts(rows).splitlines()
    assert told[0] == "| case | part | time | of the load | bytes | GB/s |"
    assert told[2:] == [
        "| a load | fault-in | 1.000 s | 25% | 1.00 GB | 1.00 |",
        "| a load | reading | 2.000 s | 50% | 1.00 GB | 0.50 |",
        "| a load | rest | 1.000 s | 25% | - | - |",
    ]


def test_parts_stand_beside_what_did_as_much_in_their_round() -> None:
    parts = [(LoadPart(FAULT_IN, 2.0, 50), LoadPart(READING, 4.0, 50), LoadPart(REST, 1.0))] * 3
    found = {FAULT_IN: [3.0] * 3, READING: [4.0] * 3}
    fault_in, reading = bench_load.rows_of_parts("a load", 100, parts, found)
    assert fault_in["ratio"]["median"] == 0.75  # half of the bytes take 1.5 s of memset
    assert reading["ratio"]["median"] == 0.5
    assert fault_in["bytes_per_s"] == 25
    rows = rows_of("load", {"rows": [fault_in, reading]})
    assert [row.case for row in rows] == ["a load: fault-in", "a load: reading"]
    assert all(row.of_bound for row in rows)


def test_no_more_is_loaded_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_load.memory_there() > 1 << 20
    monkeypatch.setattr(bench_load, "memory_there", lambda: 20 << 30)
    monkeypatch.setattr(bench_load.shutil, "disk_usage", lambda _: Usage(100 << 30))
    assert bench_load.fitting(2 << 30, tmp_path) == 2 << 30
    assert capsys.readouterr().out == ""
    assert bench_load.fitting(30 << 30, tmp_path) == 9 << 30
    told = "30.0 GiB of weights do not fit (memory): 9.0 GiB are loaded instead\n"
    assert capsys.readouterr().out == told
    monkeypatch.setattr(bench_load.shutil, "disk_usage", lambda _: Usage(10 << 29))
    assert bench_load.fitting(30 << 30, tmp_path) == 9 << 29
    assert f"({tmp_path})" in capsys.readouterr().out


def test_a_run_measures_loads_their_parts_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_load, "LARGE", SMALL)
    file = tmp_path / "load.json"
    options = ["--gib", "0.02", "--rounds", "1", "--folder", str(tmp_path), "--json", str(file)]
    assert bench_load.main(options) == 0
    document = json.loads(file.read_text())
    rows = {(row.case, row.beside): row for row in rows_of("load", document)}
    for where in ("in the page cache", "on the drive"):
        of_it = [case for case, _ in rows if case.startswith(f"load, files {where}")]
        assert len(of_it) == 5
    assert sum(case.startswith("fault-in") for case, _ in rows) == 2
    assert document["asked_bytes"] <= document["weights_bytes"]
    assert "| load, files on the drive | reading |" in capsys.readouterr().out
