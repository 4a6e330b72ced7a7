"""Pinned tensors of this package are pinned to torch and to the GPU, and copy asynchronously."""

from __future__ import annotations

import time

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session

from ..memory.machines import simulated_memory
from .slow_work import MIB, keep_busy, random_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nbytes", [1, 64, 4096, 3 * MIB + 4096, 64 * MIB])
@pytest.mark.parametrize("pages", ["base", "thp"])
def test_pinned_tensor_says_so(session: Session, nbytes: int, pages: str) -> None:
    tensor = cxl_offload.empty(nbytes, dtype=torch.uint8, pin=True, pages=pages)
    assert tensor.is_pinned()
    assert tensor[nbytes // 2 :].is_pinned()
    assert cxl_offload.placement_of(tensor).pinned


def test_tensor_without_pin_is_not_pinned(session: Session) -> None:
    tensor = cxl_offload.empty(MIB, dtype=torch.uint8)
    assert not tensor.is_pinned()
    assert not cxl_offload.placement_of(tensor).pinned


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_pinned_view_of_any_type_stays_pinned(session: Session, dtype: torch.dtype) -> None:
    tensor = cxl_offload.empty(64, 1024, dtype=dtype, pin=True)
    assert tensor.is_pinned()
    assert tensor.t().is_pinned()
    assert tensor[7:9].is_pinned()


@pytest.mark.parametrize("nbytes", [1, 4097, 32 * MIB])
def test_copies_both_ways_carry_the_bytes(session: Session, nbytes: int) -> None:
    source = cxl_offload.from_tensor(random_bytes(nbytes, 1), pin=True)
    back = cxl_offload.zeros(nbytes, dtype=torch.uint8, pin=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_gpu = source.to("cuda", non_blocking=True)
        back.copy_(on_gpu, non_blocking=True)
    for tensor in (source, back):
        cxl_offload.record_stream(tensor, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(back, random_bytes(nbytes, 1))


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy_returns_before_the_stream_is_done(session: Session, direction: str) -> None:
    host = cxl_offload.from_tensor(random_bytes(16 * MIB, 2), pin=True)
    on_gpu = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    if direction == "d2h":
        on_gpu.copy_(random_bytes(16 * MIB, 3))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    keep_busy(stream)
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        if direction == "h2d":
            on_gpu.copy_(host, non_blocking=True)
        else:
            host.copy_(on_gpu, non_blocking=True)
    took_s = time.perf_counter() - begin
    assert not stream.query(), "the stream was done before the copy was looked at"
    assert took_s < 0.1
    cxl_offload.record_stream(host, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(on_gpu.cpu(), host)
    assert torch.equal(host, random_bytes(16 * MIB, 2 if direction == "h2d" else 3))


def test_copies_of_pageable_memory_are_right_too(session: Session) -> None:
    source = cxl_offload.from_tensor(random_bytes(5 * MIB, 4))
    assert torch.equal(source.to("cuda", non_blocking=True).cpu(), source)


@pytest.mark.parametrize("policy", ["interleave:0,1,2@64KiB", "weighted:0=3,2=1@64KiB"])
def test_striped_pinned_memory_is_one_range_to_the_gpu(session: Session, policy: str) -> None:
    """Nodes are simulated, pages and DMA are real."""
    session = simulated_memory()
    source = cxl_offload.from_tensor(
        random_bytes(6 * MIB, 5), policy=policy, pin=True, session=session
    )
    granted = cxl_offload.placement_of(source, session=session).granted
    assert len(granted) > 1
    assert source.is_pinned()
    assert torch.equal(source.to("cuda", non_blocking=True).cpu(), random_bytes(6 * MIB, 5))
    torch.cuda.synchronize()
    assert cxl_offload.placement_of(source, session=session).granted == granted


@pytest.mark.parametrize("named", [True, False], ids=["stream named", "no stream named"])
def test_move_of_live_pinned_memory_waits_for_its_copies_and_pins_again(
    session: Session, named: bool
) -> None:
    """Nodes are simulated, registration and DMA are real."""
    session = simulated_memory()
    expected = random_bytes(8 * MIB, 6)
    source = cxl_offload.from_tensor(expected, policy="bind:0", pin=True, session=session)
    view, address = source[4 * MIB :], source.data_ptr()
    target = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    keep_busy(stream)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    if named:
        cxl_offload.record_stream(source, stream.cuda_stream, session=session)
    assert not stream.query(), "the work was over too early for this test to mean anything"
    cxl_offload.move(source, "bind:2", session=session)
    assert stream.query()
    assert source.data_ptr() == address
    assert dict(cxl_offload.placement_of(view, session=session).granted) == {2: 4 * MIB}
    assert source.is_pinned()
    assert view.is_pinned()
    assert torch.equal(target.cpu(), expected)
    source.fill_(3)
    assert torch.equal(view.to("cuda", non_blocking=True).cpu(), view)


def test_move_goes_by_a_copy_into_a_new_pinned_tensor(session: Session) -> None:
    session = simulated_memory()
    source = cxl_offload.from_tensor(
        random_bytes(4 * MIB, 7), policy="bind:0", pin=True, session=session
    )
    moved = cxl_offload.from_tensor(source, policy="bind:2", pin=True, session=session)
    assert dict(cxl_offload.placement_of(moved, session=session).granted) == {2: 4 * MIB}
    assert moved.is_pinned()
    assert torch.equal(moved.to("cuda").cpu(), random_bytes(4 * MIB, 7))


def test_unpinned_again_after_trim(session: Session) -> None:
    """Unregistered before its pages go, so that the same addresses can be pinned again."""
    for _ in range(3):
        tensor = cxl_offload.empty(64 * MIB, dtype=torch.uint8, pin=True)
        assert tensor.is_pinned()
        del tensor
        session.trim()
        assert session.stats().mapped_bytes.current == 0
