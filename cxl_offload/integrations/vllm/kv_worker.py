"""The copy worker for a KV cache in host memory: vLLM's platform ``cpu``.

Blocks are gathered and scattered by threads of their own, one for each direction, each with a
:class:`~cxl_offload.transfer.HostCopier`, while the model runs. On a GPU vLLM's own worker is used.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from cxl_offload.integrations.vllm.kv_copies import CopyLists, CopyQueue
from cxl_offload.integrations.vllm.kv_region import PlacedRegion


@dataclass(frozen=True, slots=True)
class _ChunkPages:
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
                _ChunkPages(each.tensor.data_ptr(), stride, view.data_ptr(), view.stride(0), page)
            )
        self._refs = [
            [(self._pages[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
            for refs in caches.group_data_refs
        ]

    def addresses(self, blocks: GPULoadStoreSpec, chunks: NDArray[np.int32]) -> CopyLists:
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
        self._table = table
        self._stores = CopyQueue(cpus, "cxl-offload-store")
        self._loads = CopyQueue(cpus, "cxl-offload-load")

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        def lists() -> CopyLists:
            cache, pool, sizes = self._table.addresses(src_spec, dst_spec.block_ids)
            return pool, cache, sizes

        self._stores.submit(job_id, lists)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._loads.submit(job_id, lambda: self._table.addresses(dst_spec, src_spec.block_ids))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Raises RuntimeError for a copy that failed: vLLM has no other way to be told."""
        results = []
        for queue, what in ((self._stores, "store"), (self._loads, "load")):
            for each in queue.finished():
                if each.failure is not None:
                    raise RuntimeError(f"{what} KV blocks: {each.failure}") from each.failure
                results.append(TransferResult(each.id, True, each.nbytes, each.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """Finishes what was submitted: the cache is gone afterwards."""
        self._stores.stop()
        self._loads.stop()
        self.region.cleanup()
