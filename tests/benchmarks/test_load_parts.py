"""The parts of a load that benchmarks/bench_load.py prints: timed calls, and their shares."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_load
from benchmarks.bench_load import FAULT_IN, PARTS, READING, REST
from benchmarks.large_checkpoint import SMALL, make_checkpoint
from cxl_offload import Session
from cxl_offload.integrations.transformers import weights

SLOWER_S = 0.02


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


def loaded(folder: Path) -> dict[str, float]:
    parts: list[dict[str, float]] = []
    took = bench_load.ours(folder, parts)
    [found] = parts
    assert found["seconds"] == took
    return found


def test_parts_are_all_of_a_load(folder: Path) -> None:
    loading: Any = weights
    allocate, filled = Session.allocate, loading.filled
    found = loaded(folder)
    assert min(found[part] for part in PARTS) > 0
    assert sum(found[part] for part in PARTS) == pytest.approx(found["seconds"])
    assert (Session.allocate, loading.filled) == (allocate, filled)


@pytest.mark.parametrize(
    ("owner", "name", "part"), [(Session, "allocate", FAULT_IN), (weights, "filled", READING)]
)
def test_a_slower_call_lengthens_its_part_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, part: str
) -> None:
    before, calls = loaded(folder), list[int]()
    monkeypatch.setattr(owner, name, slower(getattr(owner, name), calls))
    found = loaded(folder)
    added = SLOWER_S * len(calls)
    assert calls
    assert found[part] >= added
    others = [each for each in (FAULT_IN, READING) if each != part]
    assert all(found[each] < before[each] + added / 2 for each in others)


def test_parts_are_printed_with_their_share() -> None:
    one = {FAULT_IN: 0.5, READING: 1.0, REST: 0.5, "seconds": 2.0}
    two = {FAULT_IN: 1.0, READING: 2.0, REST: 1.0, "seconds": 4.0}
    rows = [{"case": "a load", "parts": [one, two, two]}, {"case": "no load"}]
    told = bench_load.printed_parts(rows).splitlines()
    assert told[0] == "| case | this package | fault-in | reading | rest |"
    assert told[2:] == ["| a load | 4.000 s | 1.000 s (25%) | 2.000 s (50%) | 1.000 s (25%) |"]
