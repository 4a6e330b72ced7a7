"""What benchmarks/bench_transformers.py keeps where one of its parts computes something wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import bench_transformers, disk_offload, llama_cpp_peer


def _rows(*_: object) -> Iterator[dict[str, Any]]:
    yield {"row": 1}


def _wrong_after_a_row(*_: object) -> Iterator[dict[str, Any]]:
    yield {"row": 1}
    raise SystemExit("wrong: logits are off")


def test_what_others_measured_stays_where_one_part_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_transformers"])
    monkeypatch.setattr(bench_transformers, "generated", _rows)
    monkeypatch.setattr(disk_offload, "compare", _wrong_after_a_row)
    monkeypatch.setattr(llama_cpp_peer, "compare", _rows)
    monkeypatch.setattr(llama_cpp_peer, "missing", lambda: "")
    document = bench_transformers.measure(bench_transformers.parse())
    assert document["rows"] == document["llama"] == [{"row": 1}]
    assert document["disk"] == []
    assert document["wrong"] == {"disk": "wrong: logits are off"}


def test_the_program_ends_with_another_status_than_for_a_missed_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"rows": [], "disk": [], "llama": [], "wrong": {"disk": "wrong"}}
    monkeypatch.setattr(sys, "argv", ["bench_transformers", "--threads", "2"])
    monkeypatch.setattr(bench_transformers, "measure", lambda args: found)
    with pytest.raises(SystemExit) as ended:
        bench_transformers.main()
    assert ended.value.code == 2
