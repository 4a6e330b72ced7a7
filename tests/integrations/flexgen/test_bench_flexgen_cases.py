"""The benchmark against stock FlexGen, on a tiny model: that both sides run, and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_flexgen, grid
from benchmarks.conditions import Conditions
from benchmarks.stock_process import StockProcess
from cxl_offload.integrations.flexgen import OptShape
from cxl_offload.integrations.flexgen.shares import home_shares, realised_kv

TINY = OptShape(layers=2, hidden=128, heads=2, positions=64)
FEW = (
    f"--rounds 1 --rows 2 --prompt-len 8 --gen-len 4 --cpu-linear half --layers {TINY.layers}"
).split()
ALONE = "attention on the CPU"


def _measure(monkeypatch: pytest.MonkeyPatch, folder: Path, case: str) -> dict[str, Any]:
    monkeypatch.setattr(bench_flexgen, "SHAPE", TINY)
    options = bench_flexgen.parse([*FEW, "--cases", case])
    (result,) = bench_flexgen.measure(options, folder, Conditions())
    return result


@pytest.mark.slow(reason="starts stock FlexGen in a process of its own")
def test_long_prompts_are_passed_over_by_both_sides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_flexgen, "MOST_COMPUTED", 0)

    result = _measure(monkeypatch, tmp_path, ALONE)

    assert "prefill" not in result
    assert result["decode"]["stock_tokens_per_s"] > 0


@pytest.mark.slow(reason="starts stock FlexGen in a process of its own")
def test_stock_process_that_fails_is_an_error_and_no_hang(tmp_path: Path) -> None:
    jobs = {"threads": 1, "cases": {}}
    stock = StockProcess(jobs, tmp_path)

    with pytest.raises(RuntimeError, match="ended with 1 in 'no such case': KeyError"):
        stock.run("no such case")
    stock.close()


def test_every_case_of_the_grid_can_be_laid_out(tmp_path: Path) -> None:
    options = bench_flexgen.parse([*FEW, "--grid"])
    made = bench_flexgen.requests(tmp_path, options)
    halves = [name for name in made if name.startswith("half of weights and KV")]
    assert {name.rpartition(", ")[2].partition(" x ")[0] for name in halves} == {"4", "8", "32"}
    assert len(made) == len(bench_flexgen.GRID) - 3 - 3  # and two batches of one row
    options.cases = [ALONE]
    assert len(bench_flexgen.requests(tmp_path, options)) == len(grid.CELLS)
    for request in made.values():
        on_accelerator, on_host = request.percent[2:4]
        realised_kv(request.gpu_batch_size, home_shares(on_accelerator, on_host, None))
