"""Copies that fail, memory that goes away early, and processes that fork."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from cxl_offload import _C
from cxl_offload.memory import Session

from .engine_ground import CHUNK, KIB, engine_of, eventually, host, on_gpu


def test_both_ends_live_as_long_as_the_transfer(session: Session, driver: _C.FakeDriver) -> None:
    source, view = host(session, CHUNK)
    wanted = view.copy()
    gpu = on_gpu(CHUNK)
    with engine_of(session, staging_bytes=0) as engine:
        handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
        del source, view, handle
        assert session.stats().allocations.current == 1
        engine.drain()
        assert (gpu == wanted).all()
        assert session.stats().allocations.current == 0


@pytest.mark.parametrize("pin", [True, False])
def test_refused_copy_fails_its_own_transfer_only(
    session: Session, driver: _C.FakeDriver, pin: bool
) -> None:
    source, view = host(session, 6 * CHUNK, f"interleave:0,1@{CHUNK // KIB}KiB", pin=pin)
    gpu = on_gpu(6 * CHUNK)
    with engine_of(session) as engine:
        driver.fail_copy(3)
        bad = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=6 * CHUNK)
        assert bad is not None
        with pytest.raises(OSError, match="as the test asked"):
            bad.wait()
        with pytest.raises(OSError, match="as the test asked"):
            bad.query()
        assert all(driver.pending(stream) == 0 for stream in engine._core.streams)
        good = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=6 * CHUNK)
        assert good is not None
        good.wait()
        assert (gpu == view).all()
        engine.drain()
        assert engine.unfinished_bytes("to_device") == 0
    del source, view, bad, good


def test_broken_gpu_ends_every_transfer_with_an_error(
    session: Session, driver: _C.FakeDriver
) -> None:
    own = _C.FakeDriver()
    session = Session.simulated(session.machine, driver=own)
    source, _ = host(session, CHUNK)
    gpu = on_gpu(CHUNK)
    engine = engine_of(session, staging_bytes=0)
    handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
    assert handle is not None
    own.break_context()
    with pytest.raises(OSError, match="broken"):
        handle.wait()
    engine.drain()
    assert engine.unfinished_bytes("to_device") == 0
    engine.close()


def test_fork_leaves_the_engine_to_the_parent(session: Session) -> None:
    source, view = host(session, CHUNK)
    gpu = on_gpu(CHUNK)
    with engine_of(session) as engine:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
            except ValueError as error:
                status = 0 if "forked child" in str(error) else 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
        assert handle is not None
        handle.wait()
        assert (gpu == view).all()
    del source, view, handle


def test_failed_transfer_leaves_the_slots_of_others_alone(
    session: Session, driver: _C.FakeDriver
) -> None:
    """The other lane's copies have not run yet, and still read their slots."""
    size = 3 * CHUNK
    near, near_view = host(session, size, "bind:0", pin=False)
    far, far_view = host(session, size, "bind:1", pin=False)
    far_view ^= 0xFF
    near_gpu, far_gpu = on_gpu(size), on_gpu(size)
    with engine_of(session) as engine:
        first = engine.to_device(target=near_gpu.ctypes.data, source=near.address, nbytes=size)
        assert first is not None
        eventually(lambda: driver.copies == 3)
        driver.fail_copy(1)
        bad = engine.to_device(target=far_gpu.ctypes.data, source=far.address, nbytes=size)
        assert bad is not None
        with pytest.raises(OSError, match="as the test asked"):
            bad.wait()
        second = engine.to_device(target=far_gpu.ctypes.data, source=far.address, nbytes=size)
        assert second is not None
        second.wait()
        first.wait()
        assert (near_gpu == near_view).all()
        assert (far_gpu == far_view).all()
    del near, near_view, far, far_view, first, second, bad


@pytest.mark.parametrize("pin", [True, False])
def test_engine_that_is_dropped_finishes_what_is_under_way(
    session: Session, driver: _C.FakeDriver, pin: bool
) -> None:
    """Without close(): its slots and both ends are there until the last byte has arrived."""
    source, view = host(session, 4 * CHUNK, pin=pin)
    wanted = view.copy()
    gpu = on_gpu(4 * CHUNK)
    engine = engine_of(session)
    engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=4 * CHUNK)
    del source, view
    assert session.stats().allocations.current == 2
    del engine
    assert (gpu == wanted).all()
    assert session.stats().allocations.current == 0


@pytest.mark.timeout(600)
def test_dropping_an_engine_waits_without_the_interpreter_s_lock(
    session: Session, driver: _C.FakeDriver
) -> None:
    source, view = host(session, CHUNK)
    gpu = on_gpu(CHUNK)
    engines = [engine_of(session)]
    engines[0].to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
    driver.hold_waiters(True)
    dropping = threading.Thread(target=engines.clear)
    dropping.start()
    eventually(lambda: driver.waiters == 1)  # needs the lock
    assert session.stats().allocations.current == 2, "slots and source stay until then"
    driver.hold_waiters(False)
    dropping.join()
    assert (gpu == view).all()
    del source, view
    gc.collect()
