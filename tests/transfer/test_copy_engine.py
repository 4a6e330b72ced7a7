"""The copy engine on a driver whose copies are done when the test says so."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload import _C
from cxl_offload.memory import Memory
from cxl_offload.transfer import NO_NODE, CopyEngine, Link, Transfer, prefetched

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 64 * KIB


def engine_of(memory: Memory, **options: Any) -> CopyEngine:
    options.setdefault("chunk_bytes", CHUNK)
    options.setdefault("staging_bytes", 8 * CHUNK)
    return CopyEngine(memory, **options)


def host(memory: Memory, nbytes: int, where: str = "bind:0", *, pin: bool = True) -> Any:
    """An allocation and its bytes, random."""
    allocation = memory.allocate(nbytes, where, pin=pin)
    view = np.from_dlpack(allocation)
    view[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return allocation, view


def on_gpu(nbytes: int) -> Any:
    return np.full(nbytes, 0xEE, np.uint8)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("did not happen within two seconds")


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("nbytes", [1, CHUNK - 1, 5 * CHUNK + 3, MIB])
@pytest.mark.parametrize("where", ["bind:0", "interleave:0,1,2@16KiB", "weighted:0=3,2=1@32KiB"])
def test_bytes_go_there_and_come_back(memory: Memory, pin: bool, nbytes: int, where: str) -> None:
    (source, view), (back, landed) = host(memory, nbytes, where, pin=pin), host(memory, nbytes)
    gpu = on_gpu(nbytes)
    with engine_of(memory) as engine:
        there = engine.to_device(gpu.ctypes.data, source.address, nbytes)
        assert there is not None
        there.wait()
        assert (gpu == view).all()
        landed[:] = 0
        home = engine.to_host(back.address, gpu.ctypes.data, nbytes)
        assert home is not None
        home.wait()
        assert home.query()
        assert (landed == view).all()
    del source, view, back, landed, there, home


def test_every_byte_is_counted_on_its_link(memory: Memory) -> None:
    nbytes = 40 * 16 * KIB + 5
    source, _ = host(memory, nbytes, "weighted:0=2,1=1,2=1@16KiB")
    loose, _ = host(memory, 3 * CHUNK, "bind:2", pin=False)
    foreign = np.zeros(1000, np.uint8)
    gpu = on_gpu(nbytes)
    with engine_of(memory) as engine:
        engine.to_device(gpu.ctypes.data, source.address, nbytes)
        engine.to_device(gpu.ctypes.data, loose.address, 3 * CHUNK)
        engine.to_host(foreign.ctypes.data, gpu.ctypes.data, 1000)
        engine.drain()
        links = engine.links()
    expected = memory.bytes_per_node(source.address, nbytes)
    assert links[Link("to_device", 0)].nbytes == expected[0]
    assert links[Link("to_device", 1)].nbytes == expected[1]
    assert links[Link("to_device", 2)].nbytes == expected[2] + 3 * CHUNK
    assert links[Link("to_device", 2)].staged_bytes == 3 * CHUNK
    assert links[Link("to_device", 0)].staged_bytes == 0
    assert links[Link("to_host", NO_NODE)].nbytes == 1000
    assert sum(use.nbytes for use in links.values()) == nbytes + 3 * CHUNK + 1000
    del source, loose


def test_slow_tier_is_under_way_with_the_fast_one(memory: Memory, driver: _C.FakeDriver) -> None:
    """A stream a node: with the CXL node's stream stuck, the other node's bytes arrive."""
    source, view = host(memory, 16 * CHUNK, f"interleave:0,2@{CHUNK // KIB}KiB")
    gpu = on_gpu(16 * CHUNK)
    with engine_of(memory) as engine:
        handle = engine.to_device(gpu.ctypes.data, source.address, 16 * CHUNK)
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


def test_pinned_bytes_of_one_node_go_in_one_copy(memory: Memory, driver: _C.FakeDriver) -> None:
    source, _ = host(memory, MIB)
    gpu = on_gpu(MIB)
    with engine_of(memory) as engine:
        engine.to_device(gpu.ctypes.data, source.address, MIB)
        assert driver.copies == 1
    del source


def test_submitting_does_not_wait_for_the_copy(memory: Memory, driver: _C.FakeDriver) -> None:
    driver.hold_waiters(True)
    source, view = host(memory, MIB)
    gpu = on_gpu(MIB)
    engine = engine_of(memory)
    handle = engine.to_device(gpu.ctypes.data, source.address, MIB)
    assert handle is not None
    assert not handle.query()
    assert (gpu == 0xEE).all()
    driver.hold_waiters(False)
    handle.wait()
    assert (gpu == view).all()
    engine.close()
    del source, view, handle


def test_source_that_is_not_pinned_is_read_before_stream_wait_returns(
    memory: Memory, driver: _C.FakeDriver
) -> None:
    source, view = host(memory, 3 * CHUNK, pin=False)
    wanted = view.copy()
    gpu = on_gpu(3 * CHUNK)
    with engine_of(memory) as engine:
        handle = engine.to_device(gpu.ctypes.data, source.address, 3 * CHUNK)
        assert handle is not None
        handle.stream_wait(77)
        driver.finish(77)
        assert (gpu == wanted).all()
    del source, view, handle


def test_staging_is_bounded_and_waits_for_the_gpu(memory: Memory, driver: _C.FakeDriver) -> None:
    """Four slots a direction: the fifth chunk must wait for the first to be done."""
    driver.hold_waiters(True)
    source, view = host(memory, 10 * CHUNK, pin=False)
    gpu = on_gpu(10 * CHUNK)
    engine = engine_of(memory)
    handle = engine.to_device(gpu.ctypes.data, source.address, 10 * CHUNK)
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


def test_limit_makes_submitters_wait_for_the_oldest(memory: Memory, driver: _C.FakeDriver) -> None:
    driver.hold_waiters(True)
    source, view = host(memory, 4 * CHUNK)
    gpu = [on_gpu(4 * CHUNK) for _ in range(3)]
    engine = engine_of(memory, limit_bytes=8 * CHUNK)
    handles = [engine.to_device(each.ctypes.data, source.address, 4 * CHUNK) for each in gpu[:2]]
    assert engine.unfinished_bytes("to_device") == 8 * CHUNK
    refused = engine.to_device(gpu[2].ctypes.data, source.address, 4 * CHUNK, wait=False)
    assert refused is None
    assert driver.copies == 2
    other = engine.to_host(source.address, gpu[0].ctypes.data, 0)
    assert other is not None
    assert other.query(), "the other direction has a limit of its own"
    late: list[Any] = []

    def submit(address: int) -> None:
        late.append(engine.to_device(gpu[2].ctypes.data, address, 4 * CHUNK))

    waiter = threading.Thread(target=submit, args=(source.address,))
    waiter.start()
    eventually(lambda: driver.waiters == 1)
    assert late == []
    driver.step(engine._core.streams[0], 1)
    waiter.join(5)
    assert len(late) == 1
    assert (gpu[0] == view).all()
    driver.hold_waiters(False)
    engine.drain()
    assert engine.unfinished_bytes("to_device") == 0
    assert all((each == view).all() for each in gpu)
    engine.close()
    late.clear()
    del source, view, handles, other


def test_transfer_larger_than_the_limit_goes_alone(memory: Memory) -> None:
    source, view = host(memory, 6 * CHUNK)
    gpu = on_gpu(6 * CHUNK)
    with engine_of(memory, limit_bytes=CHUNK) as engine:
        first = engine.to_device(gpu.ctypes.data, source.address, 6 * CHUNK)
        second = engine.to_device(gpu.ctypes.data, source.address, 6 * CHUNK)
        assert first is not None
        assert second is not None
        assert first.query(), "the second waited for it"
        second.wait()
        assert (gpu == view).all()
    del source, view, first, second


def test_copy_runs_behind_the_work_of_other_streams(memory: Memory, driver: _C.FakeDriver) -> None:
    source, view = host(memory, CHUNK)
    gpu = on_gpu(CHUNK)
    with engine_of(memory) as engine:
        driver.launch(5)
        handle = engine.to_device(gpu.ctypes.data, source.address, CHUNK, after=(5,))
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


def test_both_ends_live_as_long_as_the_transfer(memory: Memory, driver: _C.FakeDriver) -> None:
    source, view = host(memory, CHUNK)
    wanted = view.copy()
    gpu = on_gpu(CHUNK)
    with engine_of(memory, staging_bytes=0) as engine:
        handle = engine.to_device(gpu.ctypes.data, source.address, CHUNK)
        del source, view, handle
        assert memory.stats().allocations.current == 1
        engine.drain()
        assert (gpu == wanted).all()
        assert memory.stats().allocations.current == 0


@pytest.mark.parametrize("pin", [True, False])
def test_refused_copy_fails_its_own_transfer_only(
    memory: Memory, driver: _C.FakeDriver, pin: bool
) -> None:
    source, view = host(memory, 6 * CHUNK, f"interleave:0,1@{CHUNK // KIB}KiB", pin=pin)
    gpu = on_gpu(6 * CHUNK)
    with engine_of(memory) as engine:
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
    memory: Memory, driver: _C.FakeDriver
) -> None:
    own = _C.FakeDriver()
    session = Memory.simulated(memory.machine, driver=own)
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


def test_memory_that_is_not_pinned_needs_staging(memory: Memory) -> None:
    source, _ = host(memory, CHUNK, pin=False)
    gpu = on_gpu(CHUNK)
    with engine_of(memory, staging_bytes=0) as engine:
        with pytest.raises(ValueError, match="staging"):
            engine.to_device(gpu.ctypes.data, source.address, CHUNK)
        assert engine.unfinished_bytes("to_device") == 0
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


def test_tensors_bring_their_own_size_and_pinning(memory: Memory, driver: _C.FakeDriver) -> None:
    source, target = FakeTensor(np.arange(999), pinned=True), FakeTensor(np.zeros(999, np.int64))
    with engine_of(memory) as engine:
        handle = engine.to_device(target, source)
        assert handle is not None
        handle.wait()
        assert (target._array == source._array).all()
        assert engine.links()[Link("to_device", NO_NODE)].staged_bytes == 0
        with pytest.raises(ValueError, match="8 and 7992"):
            engine.to_device(target, FakeTensor(np.zeros(1)))
        with pytest.raises(ValueError, match="no size"):
            engine.to_device(1, 2)
        with pytest.raises(ValueError, match="contiguous"):
            engine.to_device(target, FakeTensor(source._array, contiguous=False))
        with pytest.raises(ValueError, match="-5"):
            engine.to_device(1, 2, -5)
    with pytest.raises(ValueError, match="closed"):
        engine.to_device(target, source)


def test_part_beyond_an_allocation_is_refused(memory: Memory) -> None:
    source, _ = host(memory, CHUNK)
    with engine_of(memory) as engine, pytest.raises(ValueError, match="64 KiB"):
        engine.to_device(1 << 40, source.address + 8, CHUNK)
    del source


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"chunk_bytes": 0}, "chunks of 0"),
        ({"limit_bytes": 0}, "limit of 0"),
        ({"staging_bytes": 3 * CHUNK}, "two chunks"),
        ({"node_bandwidth": {0: 0.0}}, "positive"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    memory: Memory, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        engine_of(memory, **options)


def test_many_threads_both_ways(memory: Memory) -> None:
    sizes = [1, CHUNK, 3 * CHUNK + 7, 20 * CHUNK]
    wrong: list[int] = []

    def work(engine: CopyEngine, seed: int) -> None:
        for turn in range(12):
            nbytes = sizes[(seed + turn) % len(sizes)]
            source, view = host(
                memory, nbytes, f"interleave:0,{1 + turn % 2}@16KiB", pin=bool(turn % 3)
            )
            back = np.zeros(nbytes, np.uint8)
            gpu = on_gpu(nbytes)
            there = engine.to_device(gpu.ctypes.data, source.address, nbytes)
            assert there is not None
            there.wait()
            home = engine.to_host(back.ctypes.data, gpu.ctypes.data, nbytes)
            assert home is not None
            home.wait()
            if not (back == view).all():
                wrong.append(seed)

    with engine_of(memory, limit_bytes=30 * CHUNK) as engine:
        threads = [threading.Thread(target=work, args=(engine, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_prefetch_gives_each_step_its_own_bytes(
    memory: Memory, driver: _C.FakeDriver, depth: int, steps: int
) -> None:
    """The consumer's work runs late: a copy that did not wait for it would be seen."""
    compute = 99
    layers = [host(memory, CHUNK + step, "bind:2") for step in range(steps)]
    slots = [on_gpu(CHUNK + 16) for _ in range(depth + 1)]
    seen = [np.zeros(CHUNK + step, np.uint8) for step in range(steps)]
    with engine_of(memory, staging_bytes=0) as engine:
        transfers = [
            Transfer(slots[step % (depth + 1)].ctypes.data, layer[0].address, CHUNK + step)
            for step, layer in enumerate(layers)
        ]
        for step, transfer in enumerate(
            prefetched(engine, iter(transfers), depth=depth, stream=compute)
        ):
            assert transfer is transfers[step]
            assert engine.links()[Link("to_device", 2)].copies == min(steps, step + 1 + depth)
            driver.copy(seen[step].ctypes.data, transfer.target, CHUNK + step, compute)
        driver.finish(compute)
        for layer, got in zip(layers, seen, strict=True):
            assert (got == layer[1]).all()
    del layers


def test_prefetch_of_nothing_ahead_is_refused(memory: Memory) -> None:
    with engine_of(memory) as engine, pytest.raises(ValueError, match="0 transfers"):
        next(prefetched(engine, [], depth=0, stream=1))


def test_fork_leaves_the_engine_to_the_parent(memory: Memory) -> None:
    source, view = host(memory, CHUNK)
    gpu = on_gpu(CHUNK)
    with engine_of(memory) as engine:
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


PIECES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(-1, 3), st.booleans()), min_size=0, max_size=12
)


@given(PIECES, st.integers(1, 100), st.dictionaries(st.integers(-1, 3), st.floats(0.1, 10)))
def test_chunks_are_the_pieces_cut_in_order_of_rate(
    pieces: Any, chunk_bytes: int, rates: dict[int, float]
) -> None:
    rows, at = [], 0
    for nbytes, lane, pinned in pieces:
        rows.append((10_000 + at, 50_000 + at, nbytes, lane, pinned))
        at += nbytes
    chunks = _C.plan_chunks(rows, chunk_bytes, rates)
    covered = sorted((device, host_, size) for device, host_, size, _, _ in chunks)
    ends = 10_000
    for device, host_, size in covered:
        assert device == ends
        assert host_ - 50_000 == device - 10_000
        ends += size
    assert ends == 10_000 + at
    lanes = {row[3] for row in rows}
    for lane in lanes:
        own = [chunk[0] for chunk in chunks if chunk[3] == lane]
        assert own == sorted(own)
    if len(lanes) > 1:
        assert all(chunk[2] <= chunk_bytes for chunk in chunks)
    progress = dict.fromkeys(lanes, 0.0)
    left = {lane: sum(chunk[3] == lane for chunk in chunks) for lane in lanes}
    for _, _, size, lane, _ in chunks:
        progress[lane] += size / rates.get(lane, 1)
        left[lane] -= 1
        going = [each for each in lanes if left[each]]
        for one, other in itertools.permutations(going, 2):
            # While both have chunks left, neither is ahead by more than a chunk of either.
            most = chunk_bytes / min(rates.get(one, 1), rates.get(other, 1))
            assert progress[one] - progress[other] <= most * 1.0001
