"""Counters of every tier, in vLLM's own Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)

__all__ = ["HOT", "CountedChunks", "TierCounts", "metric_definitions"]

HOT = "hot"
"""Label of the tier that KV blocks are stored to and loaded from."""

_DOCUMENTATION = {
    "stored": "Chunks that were written into the tier.",
    "loaded": "Chunks that were read out of the tier.",
    "evicted": "Chunks that left the tier to make room.",
    "refused": "Chunks that the tier did not take: it was full of chunks in use, or too busy.",
}


def _name(event: str) -> str:
    return f"vllm:cxl_offload_kv_{event}_chunks"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """One counter for each event, with the tier as its label."""
    return {
        _name(event): OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
        for event, text in _DOCUMENTATION.items()
    }


class TierCounts:
    """What happened in one tier; belongs to the scheduler's thread."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.totals = dict.fromkeys(_DOCUMENTATION, 0)
        self._told = dict(self.totals)

    def add(self, event: str, chunks: int) -> None:
        self.totals[event] += chunks

    def report(self, stats: OffloadingConnectorStats) -> None:
        """Adds what happened since the last report. Zeros too, so that the series exist."""
        for event, total in self.totals.items():
            stats.increase_counter(_name(event), total - self._told[event], (self.tier,))
        self._told = dict(self.totals)


class CountedChunks:
    """Beside vLLM's manager of a pool: counts what it does. Comes first among the bases.

    Attributes
    ----------
    on_change
        Called with the chunks that the pool has gained or lost.
    """

    def __init__(self, *, tier: str, **options: Any) -> None:
        self.tier_counts = TierCounts(tier)
        self.on_change: Callable[[Collection[OffloadKey]], None] = lambda keys: None
        super().__init__(**options)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        manager: Any = super()
        keys = list(keys)
        found = manager.prepare_store(keys, req_context)
        if found is None:
            policy = self._policy  # type: ignore[attr-defined]
            self.tier_counts.add("refused", sum(policy.get(key) is None for key in keys))
        elif found.evicted_keys:
            self.tier_counts.add("evicted", len(found.evicted_keys))
            self.on_change(found.evicted_keys)
        return found

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        manager: Any = super()
        manager.complete_store(keys, req_context, success)
        if success:
            self.tier_counts.add("stored", len(keys))
            self.on_change(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        manager: Any = super()
        self.tier_counts.add("loaded", len(keys))
        return manager.prepare_load(keys, req_context)

    def get_stats(self) -> OffloadingConnectorStats | None:
        manager: Any = super()
        stats = manager.get_stats() or OffloadingConnectorStats()
        self.tier_counts.report(stats)
        return stats
