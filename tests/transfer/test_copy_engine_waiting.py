"""Who waits for whom: submitters, staging, streams and many threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import CopyEngine

from .engine_ground import CHUNK, MIB, engine_of, eventually, host, on_gpu


def test_submitting_does_not_wait_for_the_copy(session: Session, driver: _C.FakeDriver) -> None:
    driver.hold_waiters(True)
    source, view = host(session, MIB)
    gpu = on_gpu(MIB)
    engine = engine_of(session)
    handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=MIB)
    assert handle is not None
    assert not handle.query()
    assert (gpu == 0xEE).all()
    driver.hold_waiters(False)
    handle.wait()
    assert (gpu == view).all()
    engine.close()
    del source, view, handle


def test_source_that_is_not_pinned_is_read_before_stream_wait_returns(
    session: Session, driver: _C.FakeDriver
) -> None:
    source, view = host(session, 3 * CHUNK, pin=False)
    wanted = view.copy()
    gpu = on_gpu(3 * CHUNK)
    with engine_of(session) as engine:
        handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=3 * CHUNK)
        assert handle is not None
        handle.stream_wait(77)
        driver.finish(77)
        assert (gpu == wanted).all()
    del source, view, handle


def test_staging_is_bounded_and_waits_for_the_gpu(session: Session, driver: _C.FakeDriver) -> None:
    """Four slots a direction: the fifth chunk must wait for the first to be done."""
    driver.hold_waiters(True)
    source, view = host(session, 10 * CHUNK, pin=False)
    gpu = on_gpu(10 * CHUNK)
    engine = engine_of(session)
    handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=10 * CHUNK)
    assert handle is not None
    eventually(lambda: driver.waiters == 1)
    assert driver.copies == 4
    stream = engine._core.streams[0]
    assert driver.step(stream, 2) == 2
    eventually(lambda: driver.copies == 6 and driver.waiters == 1)
    assert not handle.query()
    driver.hold_waiters(False)
    handle.wait()
    assert (gpu == view).all()
    engine.close()
    del source, view, handle


def test_limit_makes_submitters_wait_for_the_oldest(
    session: Session, driver: _C.FakeDriver
) -> None:
    driver.hold_waiters(True)
    source, view = host(session, 4 * CHUNK)
    gpu = [on_gpu(4 * CHUNK) for _ in range(3)]
    engine = engine_of(session, limit_bytes=8 * CHUNK)
    handles = [
        engine.to_device(target=each.ctypes.data, source=source.address, nbytes=4 * CHUNK)
        for each in gpu[:2]
    ]
    assert engine.unfinished_bytes("to_device") == 8 * CHUNK
    refused = engine.to_device(
        target=gpu[2].ctypes.data, source=source.address, nbytes=4 * CHUNK, wait=False
    )
    assert refused is None
    assert driver.copies == 2
    other = engine.to_host(target=source.address, source=gpu[0].ctypes.data, nbytes=0)
    assert other is not None
    assert other.query(), "the other direction has a limit of its own"
    late: list[Any] = []

    def submit(address: int) -> None:
        late.append(engine.to_device(target=gpu[2].ctypes.data, source=address, nbytes=4 * CHUNK))

    waiter = threading.Thread(target=submit, args=(source.address,))
    waiter.start()
    eventually(lambda: driver.waiters == 1)
    assert late == []
    driver.step(engine._core.streams[0], 1)
    waiter.join(300)
    assert len(late) == 1
    assert (gpu[0] == view).all()
    driver.hold_waiters(False)
    engine.drain()
    assert engine.unfinished_bytes("to_device") == 0
    assert all((each == view).all() for each in gpu)
    engine.close()
    late.clear()
    del source, view, handles, other


def test_transfer_larger_than_the_limit_goes_alone(session: Session) -> None:
    source, view = host(session, 6 * CHUNK)
    gpu = on_gpu(6 * CHUNK)
    with engine_of(session, limit_bytes=CHUNK) as engine:
        first = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=6 * CHUNK)
        second = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=6 * CHUNK)
        assert first is not None
        assert second is not None
        assert first.query(), "the second waited for it"
        second.wait()
        assert (gpu == view).all()
    del source, view, first, second


def test_copy_runs_behind_the_work_of_other_streams(
    session: Session, driver: _C.FakeDriver
) -> None:
    source, view = host(session, CHUNK)
    gpu = on_gpu(CHUNK)
    with engine_of(session) as engine:
        driver.launch(5)
        handle = engine.to_device(
            target=gpu.ctypes.data, source=source.address, nbytes=CHUNK, after=(5,)
        )
        assert handle is not None
        stream = engine._core.streams[0]
        driver.step(stream, 9)
        assert not handle.query()
        assert (gpu == 0xEE).all()
        driver.step(5)
        driver.step(stream, 9)
        assert handle.query()
        assert (gpu == view).all()
    del source, view, handle


def test_many_threads_both_ways(session: Session) -> None:
    sizes = [1, CHUNK, 3 * CHUNK + 7, 20 * CHUNK]
    wrong: list[int] = []

    def work(engine: CopyEngine, seed: int) -> None:
        for turn in range(12):
            nbytes = sizes[(seed + turn) % len(sizes)]
            source, view = host(
                session, nbytes, f"interleave:0,{1 + turn % 2}@16KiB", pin=bool(turn % 3)
            )
            back = np.zeros(nbytes, np.uint8)
            gpu = on_gpu(nbytes)
            there = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=nbytes)
            assert there is not None
            there.wait()
            home = engine.to_host(target=back.ctypes.data, source=gpu.ctypes.data, nbytes=nbytes)
            assert home is not None
            home.wait()
            if not (back == view).all():
                wrong.append(seed)

    with engine_of(session, limit_bytes=30 * CHUNK) as engine:
        threads = [threading.Thread(target=work, args=(engine, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
