"""A dropped pinned block serves again only when every stream that used it is done with it."""

from __future__ import annotations

import threading

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session

from .slow_work import BUSY_CYCLES, MIB, keep_busy, random_bytes

pytestmark = pytest.mark.gpu

SIZE = 8 * MIB


def pinned(value: int | None = None) -> torch.Tensor:
    tensor = cxl_offload.empty(SIZE, dtype=torch.uint8, pin=True)
    return tensor if value is None else tensor.fill_(value)


def leave_spares(count: int = 1) -> set[int]:
    """Free blocks that the pool knows to be done with; returns their addresses.

    With a spare an allocation needs no new memory, whose registration might wait for the GPU.
    """
    idle = torch.cuda.Stream()
    spares = [pinned(0) for _ in range(count)]
    for spare in spares:
        cxl_offload.record_stream(spare, idle.cuda_stream)
    return {spare.data_ptr() for spare in spares}


def read_late(block: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Queue a copy of the block behind a long kernel; returns where it will arrive."""
    with torch.cuda.stream(stream):
        target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    stream.synchronize()
    keep_busy(stream)
    with torch.cuda.stream(stream):
        target.copy_(block, non_blocking=True)
    cxl_offload.record_stream(block, stream.cuda_stream)
    return target


def test_block_being_read_is_not_given_out(session: Session) -> None:
    stream = torch.cuda.Stream()
    block = pinned()
    block.copy_(random_bytes(SIZE, 1))
    spares = leave_spares()
    target = read_late(block, stream)
    address = block.data_ptr()
    del block
    other = pinned(9)
    assert not stream.query(), "the work was over too early for this test to mean anything"
    assert other.data_ptr() != address
    assert other.data_ptr() in spares
    stream.synchronize()
    assert torch.equal(target.cpu(), random_bytes(SIZE, 1))
    again = pinned()
    assert again.data_ptr() == address


def test_allocation_under_pressure_waits_for_the_reader(session: Session) -> None:
    stream = torch.cuda.Stream()
    block = pinned()
    block.copy_(random_bytes(SIZE, 2))
    target = read_late(block, stream)
    address = block.data_ptr()
    assert not stream.query()
    del block
    again = pinned(9)
    assert stream.query(), "the block came back before its reader was done"
    assert again.data_ptr() == address
    assert torch.equal(target.cpu(), random_bytes(SIZE, 2))


def test_block_waits_for_the_slowest_of_its_streams(session: Session) -> None:
    quick, slow = torch.cuda.Stream(), torch.cuda.Stream()
    block = pinned()
    block.copy_(random_bytes(SIZE, 3))
    leave_spares()
    target = read_late(block, slow)
    with torch.cuda.stream(quick):
        second = block.to("cuda", non_blocking=True)
    cxl_offload.record_stream(block, quick.cuda_stream)
    address = block.data_ptr()
    del block
    quick.synchronize()
    other = pinned(9)
    assert not slow.query()
    assert other.data_ptr() != address
    slow.synchronize()
    assert torch.equal(target, second)
    assert pinned().data_ptr() == address


def test_block_being_written_is_not_given_out(session: Session) -> None:
    """A late device-to-host copy must not land in the next owner's bytes."""
    stream = torch.cuda.Stream()
    source = torch.full((SIZE,), 3, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    block = pinned(1)
    leave_spares(2)
    keep_busy(stream)
    with torch.cuda.stream(stream):
        block.copy_(source, non_blocking=True)
    cxl_offload.record_stream(block, stream.cuda_stream)
    del block
    others = [pinned(5) for _ in range(2)]
    assert not stream.query()
    stream.synchronize()
    for other in others:
        assert bool((other == 5).all())


def test_block_without_a_named_stream_waits_for_all(session: Session) -> None:
    stream = torch.cuda.Stream()
    block = pinned()
    block.copy_(random_bytes(SIZE, 4))
    with torch.cuda.stream(stream):
        target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    stream.synchronize()
    keep_busy(stream)
    with torch.cuda.stream(stream):
        target.copy_(block, non_blocking=True)
    address = block.data_ptr()
    del block
    again = pinned(9)
    if again.data_ptr() == address:
        assert stream.query()
    stream.synchronize()
    assert torch.equal(target.cpu(), random_bytes(SIZE, 4))


def test_drop_in_a_thread_without_context_still_waits(session: Session) -> None:
    stream = torch.cuda.Stream()
    blocks = [pinned()]
    blocks[0].copy_(random_bytes(SIZE, 5))
    leave_spares()
    target = read_late(blocks[0], stream)
    address = blocks[0].data_ptr()
    dropper = threading.Thread(target=blocks.clear)
    dropper.start()
    dropper.join()
    other = pinned(9)
    assert not stream.query()
    assert other.data_ptr() != address
    stream.synchronize()
    assert torch.equal(target.cpu(), random_bytes(SIZE, 5))


def test_default_stream_is_waited_for(session: Session) -> None:
    stream = torch.cuda.default_stream()
    block = pinned()
    block.copy_(random_bytes(SIZE, 6))
    leave_spares()
    target = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    target.copy_(block, non_blocking=True)
    cxl_offload.record_stream(block, stream.cuda_stream)
    address = block.data_ptr()
    del block
    other = pinned(9)
    assert not stream.query()
    assert other.data_ptr() != address
    stream.synchronize()
    assert torch.equal(target.cpu(), random_bytes(SIZE, 6))


def test_many_blocks_in_flight_arrive_whole(session: Session) -> None:
    """Buffers used once and dropped at once, as a loader does, over two streams."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    targets = []
    for step in range(64):
        stream = streams[step % 2]
        block = cxl_offload.empty(MIB, dtype=torch.uint8, pin=True).fill_(step)
        with torch.cuda.stream(stream):
            targets.append(block.to("cuda", non_blocking=True))
        cxl_offload.record_stream(block, stream.cuda_stream)
        del block
    torch.cuda.synchronize()
    for step, target in enumerate(targets):
        assert bool((target == step).all())
