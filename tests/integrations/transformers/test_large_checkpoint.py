"""A checkpoint larger than the near node, as its benchmark makes, loads and compares it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import large_checkpoint
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


def test_damaged_tokens_and_memory_miss_a_bar() -> None:
    document = {
        "checkpoint_bytes": 100,
        "near_limit_bytes": 60,
        "tokens_equal": True,
        "ours": {"near_bytes": 60, "peak_over_placed": 1.02},
    }
    assert all(large_checkpoint.bars(document, small=False).values())
    for change in ({"tokens_equal": False}, {"near_limit_bytes": 59}):
        assert not all(large_checkpoint.bars({**document, **change}, small=False).values())
    over = {**document, "ours": {"near_bytes": 60, "peak_over_placed": 1.021}}
    assert not all(large_checkpoint.bars(over, small=False).values())
    assert all(large_checkpoint.bars(over, small=True).values())
