"""A checkpoint larger than the near node, as its benchmark makes, loads and compares it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import large_checkpoint, run_all
from benchmarks.bars import bars_of
from benchmarks.results import rows_of
from cxl_offload import Session, load_machine
from cxl_offload.integrations.transformers import load


@pytest.mark.slow(reason="a process of its own computes stock transformers' tokens")
def test_small_form_meets_its_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, threads = tmp_path / "out.json", torch.get_num_threads()
    asked = ["--small", "--new", "3", "--threads", str(threads), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["large_checkpoint", *asked, "--json", str(result)])
    large_checkpoint.main()
    document = json.loads(result.read_text())
    found = document["ours"]
    assert set(document["bars"].values()) == {True}
    assert document["kind"] == "measured"
    assert found["near_bytes"] <= document["near_limit_bytes"] < document["checkpoint_bytes"]
    assert found["far_bytes"] >= document["checkpoint_bytes"] - found["near_bytes"]
    assert found["placed_bytes"] >= document["checkpoint_bytes"]
    assert len(found["tokens"][0]) == large_checkpoint.PROMPT + 3
    # What Python allocates beside 64 MiB is no small share of them; twice the weights is more.
    assert 0.5 < found["peak_over_placed"] < 1.8
    assert "| tokens equal to stock's | met |" in capsys.readouterr().out


def test_near_node_alone_has_no_room_for_it(tmp_path: Path) -> None:
    """The control: what the far node is for."""
    shape = large_checkpoint.Shape(64, 96, 4)
    nbytes = large_checkpoint.make_checkpoint(tmp_path, shape, 4 << 20)
    session = Session.simulated(
        load_machine(large_checkpoint.MACHINE), limits={large_checkpoint.NEAR: nbytes // 2}
    )
    with pytest.raises(MemoryError, match="node 0"):
        load(tmp_path, {"weights": "bind:0"}, session=session)
    model = load(tmp_path, {"weights": "bind:0,2"}, session=session)
    assert sum(weight.nbytes for weight in model.parameters()) == nbytes
    del model


def document(peak: float, gib: float = 8.0) -> dict[str, Any]:
    return {
        "options": {"gib": str(gib)},
        "checkpoint_bytes": 8 << 30,
        "near_limit_bytes": 6 << 30,
        "tokens_equal": True,
        "ours": {"near_bytes": 6 << 30, "peak_over_placed": peak},
    }


def test_damaged_tokens_and_memory_miss_a_bar() -> None:
    found = document(1.02)
    assert len(large_checkpoint.bars(found)) == 4
    assert all(large_checkpoint.bars(found).values())
    for change in ({"tokens_equal": False}, {"near_limit_bytes": (6 << 30) - 1}):
        assert not all(large_checkpoint.bars({**found, **change}).values())
    assert not all(large_checkpoint.bars(document(1.021)).values())
    assert all(large_checkpoint.bars(document(1.021, gib=1 / 16)).values())  # it asks no such thing


def test_run_of_all_benchmarks_has_its_row_and_asks_for_two_percent() -> None:
    (benchmark,) = run_all.in_order(["large_checkpoint"])
    command = benchmark.command(quick=True, result=Path("out.json"))
    assert command[1:3] == ["-m", large_checkpoint.__name__]
    assert "--small" in command
    (row,) = rows_of("large_checkpoint", document(1.25))
    assert (row.case, row.ratio) == ("8 GiB, 6 GiB of them near: peak memory", 0.8)
    assert row.of_bound
    assert not row.slower  # a bound is no peer
    verdicts = [
        [bar.met for bar in bars_of("large_checkpoint", document(at))] for at in (1.02, 1.03)
    ]
    assert verdicts == [[True], [False]]
