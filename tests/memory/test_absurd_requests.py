"""Requests that mean nothing end with one line: no crash, no minutes, no gigabytes."""

from __future__ import annotations

import ctypes
import mmap
import time

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.memory import Bind, Interleave, Session, Weighted, parse_policy

from .machines import GIB, MIB, simulated_machine, simulated_memory

PAGE = mmap.PAGESIZE


@pytest.fixture
def session() -> Session:
    return simulated_memory()


@pytest.mark.parametrize(
    "policy",
    [
        "interleave:0,2@8388608TiB",  # twice that is 2**64
        "weighted:0=255,2=1@72057594037927936B",  # 256 times that is 2**64
        "interleave:0,2@4194305TiB",
        "interleave:0,2@16777216TiB",  # 2**64
        "interleave:0,2@99999999999TiB",
    ],
)
def test_granules_larger_than_memory_are_refused(session: Session, policy: str) -> None:
    with pytest.raises(ValueError, match=r"granule|more than addresses of 64 bits reach"):
        session.allocate(MIB, policy)


def test_granules_whose_cycle_wraps_round_are_refused_below_the_parser(session: Session) -> None:
    policy = Interleave((0, 2), granule_bytes=1 << 61)
    with pytest.raises(MemoryError):
        session.allocate(1 << 62, policy)
    with pytest.raises(ValueError, match="granule"):
        Interleave((0, 2), granule_bytes=1 << 63)
    rule = _C.Rule(_C.RuleKind.stripe, [(0, 1), (2, 1)], granule_bytes=1 << 63)
    with pytest.raises(ValueError, match="granule"):
        _C.Session(session.kernel, {}, 1).allocate(MIB, rule)


@pytest.mark.parametrize("strict", [True, False])
def test_huge_pages_that_no_pool_has_are_refused_before_they_are_listed(
    session: Session, strict: bool
) -> None:
    begin = time.perf_counter()
    with pytest.raises(MemoryError, match="huge-page pool"):
        session.allocate(1 << 50, Interleave((0, 2)), pages="2MiB", strict=strict)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("nbytes", [0, -1, -(1 << 70)])
def test_sizes_below_one_are_refused(session: Session, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        session.allocate(nbytes, Bind((0,)))


@pytest.mark.parametrize("nbytes", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 70])
@pytest.mark.parametrize("policy", ["bind:0", "interleave:0,2", "preferred:0", "first-touch"])
def test_sizes_beyond_an_address_space_are_refused(
    session: Session, nbytes: int, policy: str
) -> None:
    with pytest.raises(MemoryError):
        session.allocate(nbytes, policy)


@pytest.mark.parametrize("node", [1 << 20, 1 << 31, 1 << 64])
def test_nodes_beyond_the_kernel_s_are_refused(session: Session, node: int) -> None:
    with pytest.raises(ValueError, match=f"{node} is not a node id"):
        Weighted({node: 1, 0: 1})
    with pytest.raises(ValueError, match=f"{node} is not a node id"):
        session.allocate(MIB, Bind((node,)))
    with pytest.raises(ValueError, match=f"{node} is not a node id"):
        session.free_bytes(node)


def place(session: Session, address: int, nbytes: int, **parts: int) -> None:
    parts = {"part_bytes": nbytes, "stride_bytes": nbytes, "count": 1} | parts
    session.place(address, nbytes, Bind((session.kernel.local_node,)), **parts)


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_that_may_not_be_written_is_not_placed(flags: int) -> None:
    session = Session.linux()
    mapping = mmap.mmap(-1, 64 * PAGE, flags=flags | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    with pytest.raises(ValueError, match="not all of the range is mapped for writing"):
        place(session, address, 64 * PAGE)


def test_memory_that_is_not_mapped_is_not_placed() -> None:
    session = Session.linux()
    mapping = mmap.mmap(-1, 64 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    libc = ctypes.CDLL(None, use_errno=True)
    hole = address + 32 * PAGE
    assert libc.munmap(ctypes.c_void_p(hole), ctypes.c_size_t(PAGE)) == 0
    try:
        with pytest.raises(ValueError, match="not all of the range is mapped for writing"):
            place(session, address, 64 * PAGE)
    finally:  # so that its owner unmaps what is there
        filled = libc.mmap
        filled.restype = ctypes.c_void_p
        fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        where, none = ctypes.c_void_p(hole), ctypes.c_long(0)
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        assert filled(where, ctypes.c_size_t(PAGE), prot, fixed, -1, none) == hole


@pytest.mark.parametrize(
    "parts",
    [
        {"part_bytes": PAGE, "stride_bytes": 1 << 63, "count": 3},
        {"part_bytes": PAGE, "stride_bytes": PAGE, "count": (1 << 64) // PAGE + 1},
        {"part_bytes": (1 << 64) - PAGE, "stride_bytes": (1 << 64) - PAGE, "count": 2},
    ],
)
def test_parts_that_wrap_round_are_refused(parts: dict[str, int]) -> None:
    session = Session.linux()
    mapping = mmap.mmap(-1, 64 * PAGE)
    address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
    with pytest.raises(ValueError, match="place"):
        place(session, address, 64 * PAGE, **parts)


def test_sums_of_copies_do_not_wrap_round() -> None:
    driver = _C.FakeDriver()
    session = Session.simulated(simulated_machine((GIB, GIB, GIB)), driver=driver)
    engine = _C.CopyEngine(
        driver, _C.HostCopier([], [(0, False, 1)]), None, chunk_bytes=MIB, limit_bytes=GIB, rates={}
    )
    pieces = [(0, 0, 1 << 63, 0, True)] * 2
    with pytest.raises(ValueError, match="no memory is so large"):
        engine.submit(_C.Direction.to_device, pieces, [], True)
    with pytest.raises(ValueError, match="give four chunks"):
        _C.CopyEngine(
            driver,
            _C.HostCopier([], [(0, False, 1)]),
            session.allocate(MIB, Bind((0,)), pin=True),
            chunk_bytes=1 << 63,
            limit_bytes=GIB,
            rates={},
        )


def test_exports_to_other_devices_are_refused(session: Session) -> None:
    block = session.allocate(MIB, Bind((0,)))
    for device in ((2, 0), (1, 1), (3, 0)):
        with pytest.raises(BufferError, match="CPU"):
            block.__dlpack__(dl_device=device)
    assert block.__dlpack__(dl_device=(1, 0)) is not None
    assert block.__dlpack__(dl_device=None) is not None
    assert parse_policy("bind:0") == Bind((0,))
