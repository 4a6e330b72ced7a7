"""The queue of copies: order, urgency, waiting and failures. No vLLM."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cxl_offload.integrations.vllm.kv_copies import CopyLists, CopyQueue

BLOCK = 4096


@pytest.fixture
def queue() -> Iterator[CopyQueue]:
    made = CopyQueue([0], "test")
    yield made
    made.stop()


def lists(target: np.ndarray, source: np.ndarray) -> CopyLists:  # type: ignore[type-arg]
    """Every block of ``source`` into ``target``, backwards."""
    places = np.arange(target.size // BLOCK, dtype=np.uint64) * np.uint64(BLOCK)
    return (
        places + np.uint64(target.ctypes.data),
        places[::-1] + np.uint64(source.ctypes.data),
        np.full(places.size, BLOCK, dtype=np.int64),
    )


def test_blocks_are_copied_by_another_thread_and_reported_once(queue: CopyQueue) -> None:
    source = np.random.default_rng(1).integers(0, 255, 64 * BLOCK, dtype=np.uint8)
    target = np.zeros_like(source)
    threads = []

    def make() -> CopyLists:
        threads.append(threading.current_thread().name)
        return lists(target, source)

    queue.submit(7, make, nbytes=target.size)
    queue.wait({7})
    (done,) = queue.finished()
    assert (done.id, done.nbytes, done.failure) == (7, target.size, None)
    assert queue.finished() == []
    assert threads == ["test"]
    assert queue.waiting_bytes == 0
    assert queue.seconds_per_byte > 0
    assert (target.reshape(64, -1) == source.reshape(64, -1)[::-1]).all()


def test_urgent_copies_go_first_and_waiting_is_for_the_named_ones(queue: CopyQueue) -> None:
    block = np.zeros(BLOCK, dtype=np.uint8)
    target = np.zeros_like(block)
    gate, started = threading.Event(), threading.Event()

    def blocked() -> CopyLists:
        started.set()
        assert gate.wait(20)
        return lists(target, block)

    queue.submit(0, blocked, nbytes=100)
    assert started.wait(20)
    for job in (1, 2):
        queue.submit(job, lambda: lists(target, block), nbytes=10)
    for job in (3, 4):
        queue.submit(job, lambda: lists(target, block), urgent=True)
    queue.wait({99})  # not under way
    assert queue.waiting_bytes == 120
    assert queue.finished() == []
    gate.set()
    queue.wait()
    assert [done.id for done in queue.finished()] == [0, 3, 4, 1, 2]
    assert queue.waiting_bytes == 0


def test_failure_is_told_with_its_job_and_the_next_job_runs(queue: CopyQueue) -> None:
    block = np.zeros(BLOCK, dtype=np.uint8)

    def broken() -> CopyLists:
        raise IndexError("no such chunk")

    queue.submit(1, broken, nbytes=5)
    target = np.zeros_like(block)
    queue.submit(2, lambda: lists(target, block))
    queue.wait()
    first, second = queue.finished()
    assert isinstance(first.failure, IndexError)
    assert (first.id, first.nbytes) == (1, 0)
    assert second.failure is None
    assert queue.waiting_bytes == 0


def test_stopping_finishes_what_was_submitted() -> None:
    queue = CopyQueue([0], "test")
    source = np.full(256 * BLOCK, 7, dtype=np.uint8)
    targets = [np.zeros_like(source) for _ in range(4)]
    for job, target in enumerate(targets):
        queue.submit(job, lambda target=target: lists(target, source))
    queue.stop()
    assert all((target == 7).all() for target in targets)
    assert len(queue.finished()) == 4
