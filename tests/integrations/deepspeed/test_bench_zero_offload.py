"""benchmarks/bench_zero_offload.py on a tiny model: beside a neighbour, and at every size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid import CELLS
from benchmarks.results import rows_of
from benchmarks.zero_report import OURS, PARTS, STOCK

from .conftest import ROOT, environment

SIZE = ["--layers", "1", "--hidden", "64", "--vocabulary", "64", "--rounds", "2", "--threads", "1"]

pytestmark = pytest.mark.usefixtures("deepspeed_there")


def run(folder: Path, *options: str) -> tuple[Any, str]:
    """The document of a quick run, and what it printed; such a small one may miss its bar."""
    file = folder / "zero.json"
    command = [sys.executable, "-m", "benchmarks.bench_zero_offload", *SIZE, *options]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert file.exists(), done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(file.read_text()), done.stdout


def test_every_sample_is_taken_beside_a_neighbour_too(tmp_path: Path) -> None:
    size = ("--length", "16", "--micro-batch", "2")
    document, told = run(tmp_path, "--neighbour", *size)
    quiet, neighbour = document["s"], document["neighbour"]
    assert {len(quiet[STOCK][part]) for part in PARTS} == {2}
    assert {len(document["s_beside"][OURS][part]) for part in PARTS} == {2}
    assert len(neighbour["cases"]) == 2 * len(PARTS)
    assert neighbour["did"]["copied_bytes_per_s"] > 0
    assert "losses of 3 steps" in told
    assert "stock's fall" in told
    assert re.search(r"CPUAdam: optimizer, beside stock DeepSpeed \| 1.15 by the lower end", told)
    assert re.search(r"beside stock DeepSpeed's own fall \| 0.95 by the lower end", told)
    rows = rows_of("zero_offload", document)
    assert sum(row.case.endswith("beside a neighbour") for row in rows) == 4 * len(PARTS)


def test_every_size_of_the_grid_is_compared_with_stock(tmp_path: Path) -> None:
    document, told = run(tmp_path, "--grid")
    assert list(document["grid"]) == list(CELLS)
    steps = {cell: each["s"][STOCK]["step"] for cell, each in document["grid"].items()}
    assert {len(each) for each in steps.values()} == {2}
    assert min(steps["32 x 512"]) > max(steps["1 x 32"])  # the batches have those sizes
    assert told.count("bit-identical") == len(CELLS)
    bars = [line for line in told.splitlines() if "0.98 by the lower end" in line]
    assert len(bars) == 2 * len(CELLS)
    assert all(": step, beside stock DeepSpeed" in line for line in bars)
    rows = rows_of("zero_offload", document)
    assert len(rows) == len(CELLS) * 2 * len(PARTS)
    assert rows[0].case == "1 x 32, placement: optimizer"
