"""The copy worker for a KV cache in host memory: vLLM's platform ``cpu``.

Blocks are gathered and scattered by threads of their own, one for each direction, each with a
:class:`~cxl_offload.transfer.HostCopier`, while the model runs. On a GPU vLLM's own worker is used.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from cxl_offload.integrations.vllm.kv_region import PlacedRegion
from cxl_offload.transfer import HostCopier

__all__ = ["BlockTable", "HostCopyWorker"]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Where one tensor's pages are: block b of the cache, block s of chunk c of the pool."""

    cache: int
    cache_stride: int
    pool: int
    pool_stride: int
    page_bytes: int


class BlockTable:
    """Turns block and chunk numbers into addresses.

    Parameters
    ----------
    caches
        vLLM's KV cache, as it hands it to the spec.
    blocks_per_chunk
        Blocks of the cache in one chunk of the pool.
    region
        Whose worker views become the pool; takes the next ones.
    """

    def __init__(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: PlacedRegion
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._pages = []
        for each in caches.tensors:
            page = each.page_size_bytes
            view = region.create_next_worker_view(page * blocks_per_chunk)
            stride = each.tensor.stride(0) * each.tensor.element_size()
            self._pages.append(
                _Pages(each.tensor.data_ptr(), stride, view.data_ptr(), view.stride(0), page)
            )
        self._refs = [
            [(self._pages[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ]

    def addresses(
        self, blocks: GPULoadStoreSpec, chunks: NDArray[np.int32]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64]]:
        """Of the cache, of the pool, and the bytes of every page of a transfer."""
        cache: list[NDArray[np.int64]] = []
        pool: list[NDArray[np.int64]] = []
        sizes: list[NDArray[np.int64]] = []
        first_block = first_chunk = 0
        per_chunk = self._blocks_per_chunk
        groups = zip(blocks.group_sizes, blocks.block_indices, self._refs, strict=True)
        for count, index, refs in groups:
            if count == 0:
                continue
            # The first chunk of a group may begin before its first block.
            places = index % per_chunk + np.arange(count, dtype=np.int64)
            group = chunks[first_chunk:].astype(np.int64)[places // per_chunk]
            ids = blocks.block_ids[first_block : first_block + count].astype(np.int64)
            for pages, nbytes in refs:
                cache.append(pages.cache + ids * pages.cache_stride)
                inside = places % per_chunk * pages.page_bytes
                pool.append(pages.pool + group * pages.pool_stride + inside)
                sizes.append(np.full(count, nbytes, dtype=np.int64))
            first_block += count
            first_chunk += int(places[-1]) // per_chunk + 1
        if not cache:
            nothing = np.zeros(0, dtype=np.uint64)
            return nothing, nothing, np.zeros(0, dtype=np.int64)
        return (
            np.concatenate(cache).view(np.uint64),
            np.concatenate(pool).view(np.uint64),
            np.concatenate(sizes),
        )


@dataclass(frozen=True, slots=True)
class _Job:
    id: int
    blocks: GPULoadStoreSpec
    chunks: NDArray[np.int32]


class _Lane:
    """One direction: a queue, and the thread that works it off in order."""

    def __init__(self, table: BlockTable, cpus: Sequence[int], *, stores: bool) -> None:
        self._table = table
        self._stores = stores
        self._copier = HostCopier(cpus=cpus)
        self._cpus = cpus
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._results: list[TransferResult] = []
        self._failure: BaseException | None = None
        self._ends = False
        name = f"cxl-offload-{'store' if stores else 'load'}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        with self._changed:
            self._check()
            self._unfinished.add(job.id)
            self._queue.append(job)
            self._changed.notify_all()

    def finished(self) -> list[TransferResult]:
        with self._changed:
            self._check()
            results, self._results = self._results, []
            return results

    def wait(self, job_ids: Collection[int]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._unfinished.isdisjoint(job_ids)
            )
            self._check()

    def stop(self) -> None:
        """Finishes what was submitted, since the cache is gone afterwards."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            what = "store" if self._stores else "load"
            raise RuntimeError(f"{what} KV blocks: {self._failure}") from self._failure

    def _run(self) -> None:
        # Inherited from a thread that vLLM may have bound to one CPU.
        os.sched_setaffinity(0, self._cpus)
        try:
            while (job := self._next()) is not None:
                result = self._copy(job)
                with self._changed:
                    self._results.append(result)
                    self._unfinished.discard(job.id)
                    self._changed.notify_all()
        except BaseException as failure:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends)
            return self._queue.popleft() if self._queue else None

    def _copy(self, job: _Job) -> TransferResult:
        begin = time.perf_counter()
        cache, pool, sizes = self._table.addresses(job.blocks, job.chunks)
        if self._stores:
            self._copier.copy_blocks(pool, cache, sizes)
        else:
            self._copier.copy_blocks(cache, pool, sizes)
        return TransferResult(
            job_id=job.id,
            success=True,
            transfer_size=int(sizes.sum()),
            transfer_time=time.perf_counter() - begin,
        )


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between a KV cache in host memory and the pool, while the model runs.

    Parameters
    ----------
    caches, blocks_per_chunk, region
        As of :class:`BlockTable`; the region is closed by :meth:`shutdown`.
    cpus
        To copy with.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: PlacedRegion,
        cpus: Sequence[int],
    ) -> None:
        self.region = region
        self._caches = caches  # alive as long as the threads
        table = BlockTable(caches, blocks_per_chunk, region)
        self._store = _Lane(table, cpus, stores=True)
        self._load = _Lane(table, cpus, stores=False)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._store.submit(_Job(job_id, src_spec, dst_spec.block_ids))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._load.submit(_Job(job_id, dst_spec, src_spec.block_ids))
        return True

    def get_finished(self) -> list[TransferResult]:
        return self._store.finished() + self._load.finished()

    def wait(self, job_ids: set[int]) -> None:
        self._store.wait(job_ids)
        self._load.wait(job_ids)

    def shutdown(self) -> None:
        self._store.stop()
        self._load.stop()
        self.region.cleanup()
