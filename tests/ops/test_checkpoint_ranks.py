"""Asynchronous checkpoints of two ranks that train on while they are written, staged in a tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow(reason="starts two processes that import torch, and saves")

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def run_ranks(folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    command = [sys.executable, "-m", "tests.ops.checkpoint_worker", "--size", "2"]
    command += ["--folder", str(folder), *flags]
    # What is freed goes back to the kernel, so that a limit is of what is held.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    started = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_save_after_one_that_failed_is_not_torn_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The first fails midway and gives its memory to the next, which has room for no more."""
    told = run_ranks(tmp_path, "--stager", "tier", "--fail-first")
    for rank in told:
        assert rank["failed_held"] == rank["state"]
        assert "drop the future of one that failed" in rank["refused"]
        assert rank["failed_then"] == 0
        assert rank["resumed"] == rank["saved"]
        assert rank["resumed_went_on"] == rank["went_on"]
        assert rank["held"] == 0
        assert rank["peak"] == rank["state"]
    assert told[0]["saved"] != told[1]["saved"]  # each has its own shard


def test_stager_without_a_copy_tears_the_save(tmp_path: Path) -> None:
    """The control: training does go on in the middle of the write."""
    told = run_ranks(tmp_path, "--stager", "as-it-is")
    assert all(rank["resumed"] not in (rank["saved"], rank["went_on"]) for rank in told)


def test_state_is_staged_on_a_device_where_the_near_memory_is_full(tmp_path: Path) -> None:
    """96 MiB a rank: torch's own stager asks for them where 72 MiB are left."""
    limits = ("--rows", "8192", "--near-mib-left", "72")
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    stock.mkdir(), ours.mkdir()
    for rank in run_ranks(stock, "--stager", "stock", *limits):
        assert rank["state"] > 95 * MIB
        assert "can't allocate memory" in rank["error"]
    for rank in run_ranks(ours, "--stager", "tier", "--tier", "dax:dax0.0", *limits):
        assert "error" not in rank
        assert rank["resumed"] == rank["saved"]
        assert rank["held"] == 0
