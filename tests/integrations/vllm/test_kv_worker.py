"""The copy worker against a copy block by block, over layouts that the tiny model does not have."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("vllm")

PAGE = 4096
BLOCKS = 40


class Rank:
    """Two groups of layers over three tensors; the last one has gaps between its pages."""

    def __init__(self, rank: int, per_chunk: int, chunks: int, name: str) -> None:
        import torch
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )

        from cxl_offload.integrations.vllm.kv_region import PlacedRegion
        from cxl_offload.integrations.vllm.kv_worker import HostCopyWorker
        from cxl_offload.memory import SharedRegion

        torch.manual_seed(rank)
        self.per_chunk, self.chunks = per_chunk, chunks
        self.pages = (512, 768, 256)
        wide = torch.randint(-128, 127, (BLOCKS, 640), dtype=torch.int8)
        self.tensors = [
            torch.randint(-128, 127, (BLOCKS, 512), dtype=torch.int8),
            torch.randint(-128, 127, (BLOCKS, 768), dtype=torch.int8),
            wide[:, 100:356],
        ]
        # Layers of one group share a tensor with those of the other; one page is padded.
        self.refs = [[(0, 512), (1, 700)], [(2, 256), (0, 480)]]
        self.slot = sum(self.pages) * per_chunk
        row = -(-2 * self.slot // PAGE) * PAGE
        caches = CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(tensor, page)
                for tensor, page in zip(self.tensors, self.pages, strict=True)
            ],
            [[CanonicalKVCacheRef(*ref) for ref in refs] for refs in self.refs],
        )
        region = PlacedRegion(
            SharedRegion(name, chunks * row, "bind:0", mappers=2),
            num_chunks=chunks,
            rank=rank,
            kv_bytes_per_chunk=row,
            cpu_page_size=self.slot,
        )
        self.pool = np.frombuffer(region.region.mapping, np.uint8, chunks * row).reshape(chunks, -1)
        self.begin = rank * self.slot
        self.worker = HostCopyWorker(caches, per_chunk, region, [0])

    def place(self, tensor: int, chunk: int, inside: int) -> Any:
        """A page of the pool, as the layout of vLLM's region has it."""
        begin = self.begin + sum(self.pages[:tensor]) * self.per_chunk + inside * self.pages[tensor]
        return self.pool[chunk, begin : begin + self.pages[tensor]]

    def close(self) -> None:
        del self.pool
        self.worker.shutdown()


@pytest.fixture(params=[1, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    name = f"test-{uuid4().hex}"
    made = [Rank(rank, request.param, 24, name) for rank in (0, 1)]
    yield made
    for rank in made:
        rank.close()


def transfer(rank: Rank, draw: random.Random) -> tuple[Any, Any, list[tuple[int, int, int, int]]]:
    """Blocks and chunks of a request, and (group, block, chunk, place in it) of each block."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    blocks = draw.sample(range(BLOCKS), 16)
    free = draw.sample(range(rank.chunks), rank.chunks)
    sizes = draw.choice([(9, 7), (0, 7), (16, 0), (1, 1)])
    firsts = [draw.randrange(8) for _ in sizes]
    rows, chunks = [], []
    at = iter(blocks)
    for group, (size, first) in enumerate(zip(sizes, firsts, strict=True)):
        begin = first % rank.per_chunk
        used = [free.pop() for _ in range(-(-(begin + size) // rank.per_chunk) if size else 0)]
        chunks += used
        for place in range(begin, begin + size):
            chunk = used[place // rank.per_chunk]
            rows.append((group, next(at), chunk, place % rank.per_chunk))
    spec = GPULoadStoreSpec([block for _, block, _, _ in rows], sizes, firsts)
    return spec, SimpleNamespace(block_ids=np.array(chunks, dtype=np.int32)), rows


def test_blocks_go_where_a_copy_one_by_one_puts_them_and_come_back(ranks: list[Rank]) -> None:
    draw = random.Random(11)
    for job in range(40):
        rank = ranks[job % 2]
        spec, chunks, rows = transfer(rank, draw)
        before = rank.pool.copy()
        expected = before.copy()
        rank.pool, mapped = expected, rank.pool
        for group, block, chunk, inside in rows:
            for tensor, nbytes in rank.refs[group]:
                page = rank.tensors[tensor][block, :nbytes].numpy().view(np.uint8)
                rank.place(tensor, chunk, inside)[:nbytes] = page
        rank.pool = mapped
        assert rank.worker.submit_store(2 * job, spec, chunks)
        rank.worker.wait({2 * job})
        (done,) = rank.worker.get_finished()
        assert (done.job_id, done.success) == (2 * job, True)
        assert done.transfer_size == sum(
            nbytes for group, *_ in rows for _, nbytes in rank.refs[group]
        )
        assert (rank.pool == expected).all(), "and not a byte beside them"

        whole = [tensor.clone() for tensor in rank.tensors]
        for group, block, _, _ in rows:
            for tensor, nbytes in rank.refs[group]:
                rank.tensors[tensor][block, :nbytes] = 0
        assert rank.worker.submit_load(2 * job + 1, chunks, spec)
        rank.worker.wait({2 * job + 1})
        (done,) = rank.worker.get_finished()
        assert done.job_id == 2 * job + 1
        for tensor, right in zip(rank.tensors, whole, strict=True):
            assert (tensor == right).all()


def test_timed_loads_decide_where_the_next_pool_goes(ranks: list[Rank], tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import TransferResult

    from cxl_offload import Session, load_machine
    from cxl_offload.integrations.vllm.kv_options import KvOptions
    from cxl_offload.integrations.vllm.kv_tuning import timed

    session = Session.simulated(load_machine("xeon8470-cxl-b"))
    state = tmp_path / "kv.json"
    asked = {"cpu_bytes_to_use": 1 << 30, "tune": "copy_time", "tune_state": str(state)}
    options = KvOptions.read(asked, session.machine)
    assert str(options.hot.policy) == "bind:0"
    rank, draw = ranks[0], random.Random(3)
    region = rank.worker.region
    worker = timed(rank.worker, region, options, session)
    assert timed(rank.worker, region, replace(options, tune_state=None), session) is rank.worker
    spec, chunks, _ = transfer(rank, draw)
    kept = [tensor.clone() for tensor in rank.tensors]
    for job in range(75):  # 20 warm up, 50 are a window; stores do not count
        assert worker.submit_store(2 * job, spec, chunks)
        worker.wait({2 * job})
        assert worker.get_finished()[0].job_id == 2 * job
        assert worker.submit_load(2 * job + 1, chunks, spec)
        worker.wait({2 * job + 1})
        (done,) = worker.get_finished()
        assert isinstance(done, TransferResult)
        assert state.exists() == (job >= 69)
    for tensor, right in zip(rank.tensors, kept, strict=True):
        assert (tensor == right).all()
    saved = json.loads(state.read_text())
    assert saved["load"] == done.transfer_size.bit_length()
    assert saved["recording"]["windows"][0]["share"] == 0.0
    assert KvOptions.read(asked, session.machine).hot.policy is not None


def test_copy_that_fails_is_an_error_of_the_engine(ranks: list[Rank]) -> None:
    worker = ranks[0].worker
    spec, chunks, _ = transfer(ranks[0], random.Random(1))
    worker.submit_load(1, SimpleNamespace(block_ids=chunks.block_ids[:0]), spec)
    worker.wait({1})
    with pytest.raises(RuntimeError, match="load KV blocks: "):
        worker.get_finished()


def test_ending_finishes_stores_that_were_submitted(ranks: list[Rank]) -> None:
    rank = ranks[0]
    spec, chunks, rows = transfer(rank, random.Random(4))
    group, block, chunk, inside = rows[0]
    tensor, nbytes = rank.refs[group][0]
    page = rank.tensors[tensor][block, :nbytes].numpy().view(np.uint8)
    rank.worker.submit_store(0, spec, chunks)
    for queue in (rank.worker._stores, rank.worker._loads):
        queue.stop()
    assert (rank.place(tensor, chunk, inside)[:nbytes] == page).all()
