"""The copy engine moves the right bytes, from every tier, and counts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import NO_NODE, CopyLink

from .engine_ground import CHUNK, KIB, MIB, engine_of, host, on_gpu


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, 5 * CHUNK + 3, MIB])
@pytest.mark.parametrize("where", ["bind:0", "interleave:0,1,2@16KiB", "weighted:0=3,2=1@32KiB"])
def test_bytes_go_there_and_come_back(session: Session, pin: bool, nbytes: int, where: str) -> None:
    (source, view), (back, landed) = host(session, nbytes, where, pin=pin), host(session, nbytes)
    gpu = on_gpu(nbytes)
    with engine_of(session) as engine:
        there = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=nbytes)
        assert there is not None
        there.wait()
        assert (gpu == view).all()
        landed[:] = 0
        home = engine.to_host(target=back.address, source=gpu.ctypes.data, nbytes=nbytes)
        assert home is not None
        home.wait()
        assert home.query()
        assert (landed == view).all()
    del source, view, back, landed, there, home


def test_every_byte_is_counted_on_its_link(session: Session) -> None:
    nbytes = 40 * 16 * KIB + 5
    source, _ = host(session, nbytes, "weighted:0=2,1=1,2=1@16KiB")
    loose, _ = host(session, 3 * CHUNK, "bind:2", pin=False)
    foreign = np.zeros(1000, np.uint8)
    gpu = on_gpu(nbytes)
    with engine_of(session) as engine:
        engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=nbytes)
        engine.to_device(target=gpu.ctypes.data, source=loose.address, nbytes=3 * CHUNK)
        engine.to_host(target=foreign.ctypes.data, source=gpu.ctypes.data, nbytes=1000)
        engine.drain()
        links = engine.links()
    expected = session.bytes_per_node(source.address, nbytes)
    assert links[CopyLink("to_device", 0)].nbytes == expected[0]
    assert links[CopyLink("to_device", 1)].nbytes == expected[1]
    assert links[CopyLink("to_device", 2)].nbytes == expected[2] + 3 * CHUNK
    assert links[CopyLink("to_device", 2)].staged_bytes == 3 * CHUNK
    assert links[CopyLink("to_device", 0)].staged_bytes == 0
    assert links[CopyLink("to_host", NO_NODE)].nbytes == 1000
    assert sum(use.nbytes for use in links.values()) == nbytes + 3 * CHUNK + 1000
    del source, loose


def test_slow_tier_is_under_way_with_the_fast_one(session: Session, driver: _C.FakeDriver) -> None:
    """A stream a node: with the CXL node's stream stuck, the other node's bytes arrive."""
    source, view = host(session, 16 * CHUNK, f"interleave:0,2@{CHUNK // KIB}KiB")
    gpu = on_gpu(16 * CHUNK)
    with engine_of(session) as engine:
        handle = engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=16 * CHUNK)
        assert handle is not None
        fast, slow = (stream for stream in engine._core.streams if driver.pending(stream))
        assert (driver.pending(fast), driver.pending(slow)) == (8, 8)
        driver.finish(fast)
        assert not handle.query()
        arrived = (gpu == view).reshape(16, CHUNK).all(axis=1)
        assert list(arrived) == [True, False] * 8
        driver.finish(slow)
        assert handle.query()
        assert (gpu == view).all()
    del source, view, handle


def test_pinned_bytes_of_one_node_go_in_one_copy(session: Session, driver: _C.FakeDriver) -> None:
    source, _ = host(session, MIB)
    gpu = on_gpu(MIB)
    with engine_of(session) as engine:
        engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=MIB)
        assert driver.copies == 1
    del source


class FakeTensor:
    def __init__(self, array: Any, *, contiguous: bool = True, pinned: bool = False) -> None:
        self._array, self._contiguous, self._pinned = array, contiguous, pinned

    @property
    def nbytes(self) -> int:
        return int(self._array.nbytes)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def is_pinned(self) -> bool:
        return self._pinned


def test_tensors_bring_their_own_size_and_pinning(session: Session, driver: _C.FakeDriver) -> None:
    source, target = FakeTensor(np.arange(999), pinned=True), FakeTensor(np.zeros(999, np.int64))
    with engine_of(session) as engine:
        handle = engine.to_device(target=target, source=source)
        assert handle is not None
        handle.wait()
        assert (target._array == source._array).all()
        assert engine.links()[CopyLink("to_device", NO_NODE)].staged_bytes == 0
        with pytest.raises(ValueError, match="8 and 7992"):
            engine.to_device(target=target, source=FakeTensor(np.zeros(1)))
        with pytest.raises(ValueError, match="no size"):
            engine.to_device(target=1, source=2)
        with pytest.raises(ValueError, match="contiguous"):
            engine.to_device(target=target, source=FakeTensor(source._array, contiguous=False))
        with pytest.raises(ValueError, match="-5"):
            engine.to_device(target=1, source=2, nbytes=-5)
    with pytest.raises(ValueError, match="closed"):
        engine.to_device(target=target, source=source)


def test_part_beyond_an_allocation_is_refused(session: Session) -> None:
    source, _ = host(session, CHUNK)
    with engine_of(session) as engine, pytest.raises(ValueError, match="64 KiB"):
        engine.to_device(target=1 << 40, source=source.address + 8, nbytes=CHUNK)
    del source


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"limit_bytes": 0}, "limit_bytes is 0"),
        ({"staging_bytes": 3 * CHUNK}, "two chunks"),
        ({"node_bandwidth": {0: 0.0}}, "positive"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    session: Session, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        engine_of(session, **options)


def test_memory_that_is_not_pinned_needs_staging(session: Session) -> None:
    source, _ = host(session, CHUNK, pin=False)
    gpu = on_gpu(CHUNK)
    with engine_of(session, staging_bytes=0) as engine:
        with pytest.raises(ValueError, match="staging"):
            engine.to_device(target=gpu.ctypes.data, source=source.address, nbytes=CHUNK)
        assert engine.unfinished_bytes("to_device") == 0
    del source
