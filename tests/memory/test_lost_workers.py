"""Workers of a DataLoader over memory that fails: torch takes SIGBUS there, so they ask again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from cxl_offload.errors import MemoryLostError
from cxl_offload.memory import SharedRegion, survive_memory_errors

PAGE = 4096


class Rows(Dataset[float]):
    """Sums of pages of a file, which is cut behind its first."""

    def __init__(self, folder: Path) -> None:
        self.region = SharedRegion("rows", 4 * PAGE, root=folder)
        self.rows = torch.frombuffer(self.region.mapping, dtype=torch.float32)[: 4 * PAGE // 4]
        self.rows.fill_(1)
        os.truncate(self.region.file, PAGE)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> float:
        return float(self.rows.view(-1, PAGE // 4)[2 * number].sum())


def ask_again(worker: int) -> None:
    survive_memory_errors(interrupt=False)


def test_workers_survive_where_they_ask_again(tmp_path: Path) -> None:
    with survive_memory_errors(interrupt=False):
        rows = Rows(tmp_path)
        first, second = DataLoader(rows, batch_size=None, num_workers=1, worker_init_fn=ask_again)
        assert first == PAGE // 4
        assert second != second  # NaN, as everywhere where nobody is interrupted


def ask_to_be_interrupted(worker: int) -> None:
    survive_memory_errors()


def test_workers_that_are_interrupted_say_what_was_lost(tmp_path: Path) -> None:
    with survive_memory_errors(interrupt=False):
        rows = Rows(tmp_path)
        loader = DataLoader(
            rows, batch_size=None, num_workers=1, worker_init_fn=ask_to_be_interrupted
        )
        with pytest.raises(MemoryLostError, match=r"in DataLoader worker process 0.*are lost"):
            list(loader)


@pytest.mark.slow(reason="torch waits five seconds for a worker that ended")
def test_workers_that_do_not_ask_are_ended_and_torch_says_so(tmp_path: Path) -> None:
    with survive_memory_errors(interrupt=False):
        rows = Rows(tmp_path)
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal: Bus error"):
            list(DataLoader(rows, batch_size=None, num_workers=1))
