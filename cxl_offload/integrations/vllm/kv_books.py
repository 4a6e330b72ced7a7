"""The books of the cold tier: those of an engine that writes it, and of one that only reads it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from cxl_offload.integrations.vllm.kv_kept import KeptToRead
from cxl_offload.integrations.vllm.kv_metrics import CountedChunks, TierCounts
from cxl_offload.kept import KeptEntry


class ColdBooks(CountedChunks, CPUOffloadingManager):  # type: ignore[misc]
    """Which chunk lies in which slot, and what goes when all are taken: as vLLM does it."""

    def restore(self, entries: Iterable[KeptEntry]) -> None:
        """Takes over what is in the slots already, the oldest first; before any request."""
        taken = set()
        for entry in entries:
            key, chunk = OffloadKey(entry.key), ChunkStatus(entry.slot)
            self._policy.insert(key, chunk)
            chunk.ref_cnt = 0
            self._policy.mark_evictable(key)
            taken.add(entry.slot)
        self._num_evictable_cache_chunks = len(taken)
        free = (slot for slot in range(self._num_chunks) if slot not in taken)
        self._free_list = list(free)[::-1]  # the first is taken first
        self._num_allocated_chunks = self._num_chunks

    def drop(self, key: OffloadKey) -> bool:
        """Takes out a damaged chunk; False where others load it, who will find it too."""
        chunk = self._policy.get(key)
        if chunk is None or chunk.ref_cnt != 0:
            return False
        self._policy.remove(key)
        self._free_chunk(chunk)
        self._num_evictable_cache_chunks -= 1
        self.on_change([key])
        return True


class ReadBooks:
    """What :class:`~cxl_offload.integrations.vllm.kv_tier.ColdTierManager` asks of its books."""

    def __init__(self, kept: KeptToRead, *, tier: str, chunk_bytes: int, num_chunks: int) -> None:
        self._kept = kept
        self._policy = None
        self.on_change: Any = lambda keys: None
        self.tier_counts = TierCounts(tier, chunk_bytes, num_chunks)

    def lookup(self, key: OffloadKey, req_context: ReqContext | None) -> LookupResult:
        return LookupResult.MISS if self._kept.find(key) is None else LookupResult.HIT

    def drop(self, key: OffloadKey) -> bool:
        """A chunk that was not what its checksum says."""
        return True

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Takes none, and counts what is not there."""
        self.tier_counts.add("refused", sum(self._kept.find(key) is None for key in keys))
        return None

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> CPULoadStoreSpec:
        """Where chunks were at their lookup."""
        self.tier_counts.add("loaded", len(keys))
        return CPULoadStoreSpec(self._kept.slots(list(keys)))

    def on_new_request(self, req_context: ReqContext) -> None:
        self._kept.look()

    def reset_cache(self) -> None:
        """What is found is the memory's to forget."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The writer's books know their own requests only."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing is held for a request."""

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing is pinned: a chunk that was replaced meanwhile is found by its checksum."""

    def take_events(self) -> Iterable[Any]:
        return ()
