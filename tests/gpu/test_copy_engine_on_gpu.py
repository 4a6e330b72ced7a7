"""The copy engine and packed blocks on a GPU; their logic is tested in tests/transfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.transfer import (
    BlockPacker,
    CopyEngine,
    PackedFormat,
    Transfer,
    pack,
    prefetched,
    unpack,
)

from ..memory.machines import simulated_memory
from .slow_work import MIB, keep_busy, random_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("where", ["bind:0", "interleave:0,1,2@64KiB"])
def test_engine_copies_both_ways(session: Session, pin: bool, where: str) -> None:
    session = simulated_memory()
    source = cxl_offload.from_tensor(
        random_bytes(9 * MIB + 5, 1), policy=where, pin=pin, session=session
    )
    back = cxl_offload.zeros(source.shape, dtype=torch.uint8, pin=pin, session=session)
    on_gpu = torch.zeros(source.shape, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with CopyEngine(session, chunk_bytes=MIB, staging_bytes=8 * MIB) as engine:
        there = engine.to_device(target=on_gpu, source=source)
        assert there is not None
        there.wait()
        assert torch.equal(on_gpu.cpu(), source)
        home = engine.to_host(target=back, source=on_gpu)
        assert home is not None
        home.wait()
        assert torch.equal(back, source)
        assert sum(use.nbytes for use in engine.links().values()) == 2 * source.nbytes


def test_engine_waits_for_the_stream_that_writes_and_holds_the_one_that_reads(
    session: Session,
) -> None:
    source = cxl_offload.from_tensor(random_bytes(8 * MIB, 2), pin=True)
    on_gpu = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    compute = torch.cuda.Stream()
    with CopyEngine(session, staging_bytes=0) as engine:
        keep_busy(compute)
        with torch.cuda.stream(compute):
            on_gpu.fill_(3)
        handle = engine.to_device(target=on_gpu, source=source, after=(compute.cuda_stream,))
        assert handle is not None
        assert not handle.query()
        handle.stream_wait(compute.cuda_stream)
        with torch.cuda.stream(compute):
            seen = on_gpu.clone()
        compute.synchronize()
        assert handle.query()
        assert torch.equal(seen.cpu(), source)


def test_prefetched_layers_arrive_in_time(session: Session) -> None:
    layers = [cxl_offload.from_tensor(random_bytes(2 * MIB, 10 + i), pin=True) for i in range(12)]
    slots = [torch.zeros(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    compute = torch.cuda.Stream()
    seen = []
    with CopyEngine(session) as engine:
        transfers = [Transfer(target=slots[i % 3], source=layer) for i, layer in enumerate(layers)]
        for transfer in prefetched(engine, transfers, depth=2, stream=compute.cuda_stream):
            keep_busy(compute, 20_000_000)
            with torch.cuda.stream(compute):
                seen.append(transfer.target.clone())  # type: ignore[union-attr]
        compute.synchronize()
    for got, layer in zip(seen, layers, strict=True):
        assert torch.equal(got.cpu(), layer)


@pytest.mark.parametrize("code", ["int4", "fp8"])
@pytest.mark.parametrize("element", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("elements", [1, 1000, 65536])
def test_packed_blocks_are_those_of_the_cpu(
    session: Session, code: Any, element: str, elements: int
) -> None:
    layout = PackedFormat(code, element, 64)  # type: ignore[arg-type]
    numbers = torch.randn(6, elements, device="cuda").to(getattr(torch, element))
    room = -(-layout.packed_bytes(elements) // 16) * 16
    coded = cxl_offload.zeros(6, room, dtype=torch.uint8, pin=True)
    packer = BlockPacker(session, layout, node=session.kernel.local_node)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    plain = [numbers[row].data_ptr() for row in range(6)]
    packed = [coded[row].data_ptr() for row in range(6)]
    packer.pack(sources=plain, targets=packed, elements=elements, stream=stream.cuda_stream)
    stream.synchronize()
    own = torch.zeros(6, room, dtype=torch.uint8)
    local, expected = numbers.cpu(), torch.zeros_like(numbers, device="cpu")
    for row in range(6):
        pack(layout, source=local[row].data_ptr(), elements=elements, target=own[row].data_ptr())
        unpack(
            layout, source=own[row].data_ptr(), elements=elements, target=expected[row].data_ptr()
        )
    assert torch.equal(coded, own)
    back = torch.zeros_like(numbers)
    torch.cuda.synchronize()
    packer.unpack(
        sources=packed,
        targets=[back[row].data_ptr() for row in range(6)],
        elements=elements,
        stream=stream.cuda_stream,
    )
    stream.synchronize()
    cxl_offload.record_stream(coded, stream.cuda_stream)
    assert torch.equal(back.cpu(), expected)
