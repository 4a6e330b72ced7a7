"""Forked children read what they inherit, and the pools of their parent stay as they are."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import cxl_offload
from cxl_offload import _C
from cxl_offload.memory import Bind, Preferred, Session, Weighted

from .ground import GIB, KIB, MIB, check_all_returned, kernel_of, simulated

FORK = multiprocessing.get_context("fork")


@contextmanager
def churning(session: Session) -> Iterator[None]:
    """Threads that allocate and free all the while, so that locks are held when a fork happens."""
    stop = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[_C.Allocation] = []
        while not stop.is_set():
            held.append(session.allocate(rng.randrange(1, 64 * KIB), Preferred((0,))))
            if len(held) > 20:
                held.clear()
                session.stats()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def inherit(session: Session, blocks: list[_C.Allocation], views: list[np.ndarray]) -> None:  # type: ignore[type-arg]
    """What a child does: reads, writes its own copy, drops, and tries what it may not."""
    for value, view in enumerate(views):
        if not (view == value).all():
            os._exit(10)
        view[:] = 99
    blocks.clear()
    views.clear()
    gc.collect()
    if session.stats().mapped_bytes.current != 0 or session.trim() != 0:
        os._exit(11)
    try:
        session.allocate(1, Bind((0,)))
    except ValueError:
        os._exit(0)
    os._exit(12)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["linux", "simulated"])
def test_children_read_while_threads_of_the_parent_allocate(kind: str) -> None:
    session = Session.linux() if kind == "linux" else simulated(GIB)
    sizes = [100, 5 * KIB, MIB, 100, 3 * MIB]
    blocks = [session.allocate(size, Bind((0,))) for size in sizes]
    views = [np.from_dlpack(block) for block in blocks]  # type: ignore[arg-type]
    for value, view in enumerate(views):
        view[:] = value
    with churning(session):
        for _ in range(2):
            children = [
                FORK.Process(target=inherit, args=(session, blocks, views)) for _ in range(3)
            ]
            for child in children:
                child.start()
            for child in children:
                child.join()
            assert [child.exitcode for child in children] == [0] * 3
    assert all((view == value).all() for value, view in enumerate(views))
    assert session.stats().allocations.current == len(sizes)
    assert [block.bytes_per_node() for block in blocks] == [{0: size} for size in sizes]
    del view
    views.clear()
    blocks.clear()
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    if session.is_simulated:
        check_all_returned(session)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


@pytest.mark.timeout(600)
def test_data_loader_workers_read_a_striped_tensor_that_moved() -> None:
    session = simulated(GIB)
    stripes = Weighted({0: 3, 2: 1}, granule_bytes=64 * KIB)
    source = torch.arange(256 * 1024, dtype=torch.float32).view(256, 1024)
    rows = cxl_offload.from_tensor(source, policy=stripes, session=session)
    before = cxl_offload.placement_of(rows, session=session).granted
    for target in ("bind:1", stripes):
        cxl_offload.move(rows, target, session=session)
        loader = torch.utils.data.DataLoader(
            Rows(rows), batch_size=16, num_workers=2, multiprocessing_context="fork"
        )
        assert torch.equal(torch.cat(list(loader)), source)
    assert cxl_offload.placement_of(rows, session=session).granted == before
    del rows, loader
    gc.collect()
    check_all_returned(session)


IMPORTED_IN_A_CHILD = """
import os, signal, sys, time
import torch

torch.set_num_threads(2)
torch.ones(1 << 20).sum()  # OpenMP has threads now
child = os.fork()
if child == 0:
    from cxl_offload.ops.adam import adam_step

    torch.set_num_threads(2)  # as many as the library would borrow
    tensors = [torch.zeros(30_003) for _ in range(4)]
    adam_step(*tensors, step=1, lr=0.5, threads=2)
    os._exit(0)
for _ in range(60_000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        sys.exit(status)
    time.sleep(0.005)
os.kill(child, signal.SIGKILL)
sys.exit("it hangs")
"""


@pytest.mark.slow(reason="imports torch, and again in a child")
@pytest.mark.timeout(600)
def test_package_imported_after_a_fork_leaves_the_threads_of_openmp_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_IN_A_CHILD], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pages_that_a_child_shares_are_no_full_node() -> None:
    """The kernel refuses them to a move (EACCES); they stay whole, where they are."""
    session = simulated(GIB)
    block = session.allocate(3 * MIB, Bind((0,)))
    for _ in range(2):
        for call in (1, 2):
            kernel_of(session).fail("move", call=call, effect=_C.FaultEffect.shared)
        with pytest.raises(PermissionError, match="3 MiB stay where they are, for a forked child"):
            session.move(block, Bind((2,)))
        assert block.bytes_per_node() == {0: 3 * MIB}
    for call in (1, 2):
        kernel_of(session).fail("move", call=call, effect=_C.FaultEffect.shared)
    session.move(block, Preferred((2,)))
    assert any("a forked child has them as well" in note for note in block.notes)
    session.move(block, Bind((2,)))
    assert block.bytes_per_node() == {2: 3 * MIB}
    del block
    check_all_returned(session)
