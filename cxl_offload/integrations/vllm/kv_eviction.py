"""Eviction that knows what each tier's loss costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy


class CostPolicy(LRUCachePolicy):  # type: ignore[misc]
    """GreedyDual: evicts what is cheapest to have again, older before younger.

    A chunk's credit is the clock at its last use plus the seconds that it takes to have it again:
    those of a copy where the other tier holds it, those of computing it where none does. The chunk
    of the least credit goes, and the clock moves on to that credit. With one cost for all chunks
    that is LRU.

    Source: N. E. Young, "The k-server dual and loose competitiveness for paging", Algorithmica 11,
    1994.

    Attributes
    ----------
    cost
        Chunk to seconds; set by the spec, which knows the tiers. Zero for all until then.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.cost: Callable[[OffloadKey], float] = lambda key: 0.0
        self._clock = 0.0
        # Clock at the last use, and credit.
        self._credits: dict[OffloadKey, tuple[float, float]] = {}

    def _rank(self, key: OffloadKey, since: float, order: int) -> None:
        credit = since + self.cost(key)
        self._credits[key] = (since, credit)
        self._ranks[key] = (credit, order)

    def _assign_new_rank(self, key: OffloadKey) -> bool:
        if key not in self.chunks:
            return False
        self._next_rank += 1
        self._rank(key, self._clock, self._next_rank)
        return key in self._evictable

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self.chunks[key] = chunk
        if self._assign_new_rank(key) or chunk.ref_cnt == 0:
            self._evictable.add(key)
            self._push_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self._credits.pop(key, None)

    def clear(self) -> None:
        super().clear()
        self._credits.clear()
        self._clock = 0.0

    def rank_again(self, keys: Iterable[OffloadKey]) -> None:
        """To be called when the other tier has gained or lost chunks; their age stays."""
        for key in keys:
            if key not in self.chunks:
                continue
            since, before = self._credits[key]
            self._rank(key, since, self._ranks[key][1])
            if self._credits[key][1] != before and key in self._evictable:
                self._push_evictable(key)
        self._maybe_compact_heap()

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        found: list[tuple[OffloadKey, ChunkStatus]] | None = super().evict(n, protected)
        for key, _ in found or ():
            self._clock = max(self._clock, self._credits.pop(key)[1])
        return found
