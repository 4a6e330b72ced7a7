"""Copies that fail, memory that goes away early, and processes that fork."""

from __future__ import annotations

import os

import pytest

from cxl_offload import _C
from cxl_offload.memory import Session

from .engine_ground import CHUNK, KIB, engine_of, host, on_gpu


def test_both_ends_live_as_long_as_the_transfer(session: Session, driver: _C.FakeDriver) -> None:
    source, view = host(session, CHUNK)
    wanted = view.copy()
    gpu = on_gpu(CHUNK)
    with engine_of(session, staging_bytes=0) as engine:
        handle = engine.to_device(gpu.ctypes.data, source.address, CHUNK)
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
        bad = engine.to_device(gpu.ctypes.data, source.address, 6 * CHUNK)
        assert bad is not None
        with pytest.raises(OSError, match="as the test asked"):
            bad.wait()
        with pytest.raises(OSError, match="as the test asked"):
            bad.query()
        assert all(driver.pending(stream) == 0 for stream in engine._core.streams)
        good = engine.to_device(gpu.ctypes.data, source.address, 6 * CHUNK)
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
    handle = engine.to_device(gpu.ctypes.data, source.address, CHUNK)
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
                engine.to_device(gpu.ctypes.data, source.address, CHUNK)
            except ValueError as error:
                status = 0 if "forked child" in str(error) else 2
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        handle = engine.to_device(gpu.ctypes.data, source.address, CHUNK)
        assert handle is not None
        handle.wait()
        assert (gpu == view).all()
    del source, view, handle
