"""Ctrl-C during fault-in and moves: seen between two steps, undone, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from queue import Queue

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.memory import Bind, Session, Weighted

from .ground import GIB, MIB, check_against_kernel, check_all_returned, kernel_of, simulated

SIZE = GIB  # 16 steps
PAGE = os.sysconf("SC_PAGE_SIZE")


def send_sigint(session: Session, operation: str, call: int) -> None:
    """The call-th call of an operation from now sends this process SIGINT, whoever makes it."""
    kernel_of(session).fail(operation, call=call, effect=_C.FaultEffect.signal)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises, also where the tests were started with the signal ignored (nohup, CI)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def session() -> Session:
    """One thread faults in, so that it is known which call comes next."""
    return simulated(4 * GIB, max_threads=1)


def test_fault_in_by_several_threads_is_undone() -> None:
    session = simulated(4 * GIB, max_threads=3)
    send_sigint(session, "populate", 3)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        block = session.allocate(SIZE, Bind((2,)))
        del block  # where the others were done before the caller could look
        time.sleep(0.1)  # the kernel interrupts a thread on another CPU a moment later
    session.trim()
    check_all_returned(session)


@pytest.mark.parametrize("policy", [Bind((2,)), Weighted({0: 3, 2: 1}, granule_bytes=64 * MIB)])
def test_fault_in_ends_at_the_next_step(session: Session, policy: Bind | Weighted) -> None:
    send_sigint(session, "populate", 3)
    with pytest.raises(KeyboardInterrupt):
        session.allocate(SIZE, policy)
    assert kernel_of(session).calls["populate"] < 8
    check_all_returned(session)
    assert session.allocate(SIZE, policy).nbytes == SIZE


def test_move_ends_at_the_next_step_and_goes_back(session: Session) -> None:
    block = session.allocate(SIZE, Bind((0,)))
    view = np.from_dlpack(block)  # type: ignore[arg-type]
    view[:: 64 * MIB] = 7
    moves = kernel_of(session).calls["move"]
    send_sigint(session, "move", 3)
    with pytest.raises(KeyboardInterrupt):
        session.move(block, Bind((2,)))
    assert kernel_of(session).calls["move"] < moves + 8  # there and back
    assert block.bytes_per_node() == {0: SIZE}
    assert (view[:: 64 * MIB] == 7).all()
    check_against_kernel(session, [block])
    session.move(block, Bind((2,)))
    assert block.bytes_per_node() == {2: SIZE}
    del block, view
    check_all_returned(session)


def test_interrupted_move_of_pinned_memory_pins_it_again(session: Session) -> None:
    driver = _C.FakeDriver()
    session = simulated(4 * GIB, driver=driver, max_threads=2)
    block = session.allocate(SIZE, Bind((0,)), pin=True)
    send_sigint(session, "move", 2)
    with pytest.raises(KeyboardInterrupt):
        session.move(block, Bind((1,)))
    assert block.pinned
    assert block.bytes_per_node() == {0: SIZE}
    send_sigint(session, "move", 2)
    driver.fail_registration(1)
    with pytest.raises(KeyboardInterrupt):
        session.move(block, Bind((1,)))
    assert not block.pinned
    assert any("not pinned since a move that failed" in note for note in block.notes)
    del block
    check_all_returned(session)
    assert driver.registered_bytes == 0


def test_a_handler_of_one_s_own_decides(session: Session) -> None:
    """A handler that raises nothing ends nothing; what it raises is what the caller sees."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        send_sigint(session, "populate", 2)
        block = session.allocate(SIZE, Bind((2,)))
        assert seen == [signal.SIGINT]
        assert block.bytes_per_node() == {2: SIZE}
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_are_left_to_the_main_thread(session: Session) -> None:
    """Python handles signals there alone: a worker that allocates finishes."""
    done: Queue[_C.Allocation] = Queue()
    worker = threading.Thread(target=lambda: done.put(session.allocate(SIZE, Bind((2,)))))
    send_sigint(session, "populate", 2)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        worker.start()
        time.sleep(60)
    assert done.get(timeout=60).bytes_per_node() == {2: SIZE}  # a join that is interrupted is over
    worker.join()


class ResidentBytes:
    """Most bytes this process held beyond those at the start; SIGINT once they pass a limit."""

    def __init__(self, limit: int) -> None:
        self.most = 0
        self._limit = limit
        self._begin = self._now()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> ResidentBytes:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()

    @staticmethod
    def _now() -> int:
        with open("/proc/self/statm") as text:
            return int(text.read().split()[1]) * PAGE

    def _watch(self) -> None:
        sent = False
        while not self._stop.wait(0.001):
            self.most = max(self.most, self._now() - self._begin)
            if not sent and self.most > self._limit:
                signal.raise_signal(signal.SIGINT)
                sent = True


@pytest.mark.timeout(600)
def test_fault_in_on_this_machine_is_undone_before_it_is_whole() -> None:
    session = Session.linux()
    with pytest.raises(KeyboardInterrupt), ResidentBytes(64 * MIB) as resident:
        session.allocate(2 * GIB, Bind((session.kernel.local_node,)))
    assert resident.most < GIB  # every thread ends at its next step, which are 64 MiB
    session.trim()
    stats = session.stats()
    assert stats.mapped_bytes.current == 0
    assert stats.allocations.current == 0
