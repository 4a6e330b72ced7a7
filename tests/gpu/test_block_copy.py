"""Scattered blocks between the GPU and pinned host memory, by our kernel."""

from __future__ import annotations

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.transfer import BlockCopier

from .slow_work import random_bytes

pytestmark = pytest.mark.gpu


@pytest.fixture
def copier(session: Session) -> BlockCopier:
    return BlockCopier(session, node=session.kernel.local_node)


def spread(count: int, seed: int) -> list[int]:
    """Which of twice as many places are used, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(2 * count, generator=generator)[:count].tolist()


@pytest.mark.parametrize(
    "block_bytes", [1, 3, 16, 17, 512, 4096, 4104, 65536, 1 << 20, (1 << 20) + 16]
)
@pytest.mark.parametrize("count", [1, 7, 64])
def test_blocks_arrive_and_nothing_else_changes(
    copier: BlockCopier, block_bytes: int, count: int
) -> None:
    host = cxl_offload.from_tensor(random_bytes(2 * count * block_bytes, 1), pin=True)
    on_gpu = random_bytes(2 * count * block_bytes, 2).cuda()
    sources, targets = spread(count, 3), spread(count, 4)
    expected = on_gpu.cpu().view(-1, block_bytes)
    expected[targets] = host.view(-1, block_bytes)[sources]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    copier.copy(
        sources=[host.data_ptr() + place * block_bytes for place in sources],
        targets=[on_gpu.data_ptr() + place * block_bytes for place in targets],
        block_bytes=block_bytes,
        stream=stream.cuda_stream,
    )
    stream.synchronize()
    assert torch.equal(on_gpu.cpu().view(-1, block_bytes), expected)


@pytest.mark.parametrize("block_bytes", [5, 4096, 1 << 20])
def test_blocks_come_back_from_the_gpu(copier: BlockCopier, block_bytes: int) -> None:
    count = 33
    on_gpu = random_bytes(2 * count * block_bytes, 5).cuda()
    host = cxl_offload.full((2 * count * block_bytes,), 255, dtype=torch.uint8, pin=True)
    sources, targets = spread(count, 6), spread(count, 7)
    expected = host.clone().view(-1, block_bytes)
    expected[targets] = on_gpu.cpu().view(-1, block_bytes)[sources]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    copier.copy(
        sources=[on_gpu.data_ptr() + place * block_bytes for place in sources],
        targets=[host.data_ptr() + place * block_bytes for place in targets],
        block_bytes=block_bytes,
        stream=stream.cuda_stream,
    )
    stream.synchronize()
    assert torch.equal(host.view(-1, block_bytes), expected)


def test_lists_of_addresses_are_not_reused_too_early(copier: BlockCopier) -> None:
    """Many launches behind a long kernel: each must still find its own lists."""
    stream = torch.cuda.Stream()
    host = cxl_offload.from_tensor(random_bytes(256 * 4096, 8), pin=True)
    on_gpu = torch.zeros(256 * 4096, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
    for place in range(256):
        copier.copy(
            sources=[host.data_ptr() + place * 4096],
            targets=[on_gpu.data_ptr() + place * 4096],
            block_bytes=4096,
            stream=stream.cuda_stream,
        )
    stream.synchronize()
    assert torch.equal(on_gpu.cpu(), host)
