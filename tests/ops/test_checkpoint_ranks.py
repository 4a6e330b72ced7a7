"""Asynchronous checkpoints of two ranks that train on while they are written, staged in a tier."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.memory.dax_devices import write_device
from tests.ops.checkpoint_worker import DEVICE_BYTES, device_root
from tests.placement.memory_group import MemoryGroup, memory_group

pytestmark = pytest.mark.slow(reason="starts two processes that import torch, and saves")

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it wrote."""

    status: int
    text: str

    def told(self) -> dict[str, Any]:
        assert self.status == 0, self.text
        answer: dict[str, Any] = json.loads(self.text.splitlines()[-1])
        return answer


def ended_ranks(folder: Path, *flags: str, group: MemoryGroup | None = None) -> list[Ended]:
    """How each of two ranks ended; all their memory is the group's."""
    command = [sys.executable, "-m", "tests.ops.checkpoint_worker", "--size", "2"]
    command += ["--folder", str(folder), *flags]
    if group is not None:
        command = group.joined_by([*command, "--group", str(group.folder)])
    # What is freed goes back to the kernel, so that a limit is of what is held.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    started = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], cwd=ROOT, env=env, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    texts = [process.communicate(timeout=600)[0] for process in started]
    return [Ended(each.returncode, text) for each, text in zip(started, texts, strict=True)]


def run_ranks(folder: Path, *flags: str, group: MemoryGroup | None = None) -> list[dict[str, Any]]:
    """What each of two ranks printed."""
    return [each.told() for each in ended_ranks(folder, *flags, group=group)]


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


FULL = ("--rows", "8192", "--near-mib-left", "144")
"""Ranks whose state is 96 MiB each, and the MiB that both of them have left."""


def test_torchs_own_staging_is_killed_where_the_near_memory_is_full(tmp_path: Path) -> None:
    with memory_group() as group:
        ranks = ended_ranks(tmp_path, "--stager", "stock", *FULL, group=group)
        assert group.kills >= 1
    assert -signal.SIGKILL in {each.status for each in ranks}
    # One that lives on in the room of the other has nobody to save with.
    assert all(each.status for each in ranks), ranks
    assert not (tmp_path / "saved" / ".metadata").exists()


def test_state_is_staged_on_a_device_where_the_near_memory_is_full(tmp_path: Path) -> None:
    """The files that stand for memory of devices are this process's: it made all their pages."""
    for rank in range(2):
        root = device_root(tmp_path, rank)
        write_device(root, "dax0.0", size=DEVICE_BYTES)
        (root / "dev/dax0.0").write_bytes(bytes(DEVICE_BYTES))
    with memory_group() as group:
        told = run_ranks(tmp_path, "--stager", "tier", "--tier", "dax:dax0.0", *FULL, group=group)
        assert group.kills == 0
    for rank in told:
        assert rank["state"] > 95 * MIB
        assert rank["files"] == ["dax0.0"]
        assert rank["resumed"] == rank["saved"]
        assert rank["resumed_went_on"] == rank["went_on"]
        assert rank["held"] == 0
