"""Counters of every tier, in vLLM's own Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)

from cxl_offload.tune import decisions

HOT = "hot"
"""Label of the tier that KV blocks are stored to and loaded from."""

_DOCUMENTATION = {
    "stored": "Chunks that were written into the tier.",
    "loaded": "Chunks that were read out of the tier.",
    "evicted": "Chunks that left the tier to make room.",
    "damaged": "Chunks that were no longer what had been written, and were dropped.",
    "refused": "Chunks that the tier did not take: it was full of chunks in use, or too busy.",
    "declined": "Chunks that were not stored, because few like them come back.",
}
_OF_THE_FIRST = ("declined",)
"""Events that concern all tiers, and are counted where stores arrive."""

_DECISIONS = "vllm:cxl_offload_tune_decisions"
_CHUNK_BYTES = "vllm:cxl_offload_kv_chunk_bytes"
_CAPACITY = "vllm:cxl_offload_kv_capacity_chunks"
_RETURNING = "vllm:cxl_offload_kv_returning_share"


def _name(event: str) -> str:
    return f"vllm:cxl_offload_kv_{event}_chunks"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """A counter for each event and two gauges by tier, and the decisions of tuners."""
    tier = ("tier",)
    counters = {
        _name(event): OffloadingCounterMetadata(documentation=text, labelnames=tier)
        for event, text in _DOCUMENTATION.items()
    }
    return counters | {
        _DECISIONS: OffloadingCounterMetadata(
            documentation="Decisions of tuners in the process of the scheduler.",
            labelnames=("tuner", "outcome"),
        ),
        _CHUNK_BYTES: OffloadingGaugeMetadata("Bytes of a chunk, all ranks together.", tier),
        _CAPACITY: OffloadingGaugeMetadata("Chunks that the tier has room for.", tier),
        _RETURNING: OffloadingGaugeMetadata(
            "Of the chunks that were new of late, the share that came back.", tier
        ),
    }


class TierCounts:
    """What happened in one tier; belongs to the scheduler's thread.

    Parameters
    ----------
    tier
        Its label.
    chunk_bytes, capacity
        Bytes of a chunk, and how many there is room for.
    """

    def __init__(self, tier: str, chunk_bytes: int, capacity: int) -> None:
        self.tier = tier
        self._gauges = {_CHUNK_BYTES: chunk_bytes, _CAPACITY: capacity}
        events = [event for event in _DOCUMENTATION if tier == HOT or event not in _OF_THE_FIRST]
        self.totals = dict.fromkeys(events, 0)
        self._told = dict(self.totals)

    def add(self, event: str, chunks: int) -> None:
        self.totals[event] += chunks

    def report(self, stats: OffloadingConnectorStats) -> None:
        """Adds what happened since the last report. Zeros too, so that the series exist."""
        for event, total in self.totals.items():
            stats.increase_counter(_name(event), total - self._told[event], (self.tier,))
        self._told = dict(self.totals)
        for name, value in self._gauges.items():
            stats.set_gauge(name, value, (self.tier,))


def report_admission(stats: OffloadingConnectorStats, share: float) -> None:
    """Says how many chunks come back, which decides whether new ones are stored."""
    stats.set_gauge(_RETURNING, share, (HOT,))


_told_decisions: Counter[tuple[str, str]] = Counter()


def report_decisions(stats: OffloadingConnectorStats) -> None:
    """Adds what tuners of this process have decided since the last report.

    A worker's decisions are seen where it shares the scheduler's process, as on one GPU without
    ``VLLM_ENABLE_V1_MULTIPROCESSING``; elsewhere its log has them.
    """
    for one in decisions():
        key = (one.tuner, one.outcome)
        if one.framework == "vllm":
            stats.increase_counter(_DECISIONS, one.count - _told_decisions[key], key)
            _told_decisions[key] = one.count


class CountedChunks:
    """Beside vLLM's manager of a pool: counts what it does. Comes first among the bases.

    Attributes
    ----------
    on_change
        Called with the chunks that the pool has gained or lost.
    """

    def __init__(self, *, tier: str, chunk_bytes: int, num_chunks: int, **options: Any) -> None:
        self.tier_counts = TierCounts(tier, chunk_bytes, num_chunks)
        self.on_change: Callable[[Collection[OffloadKey]], None] = lambda keys: None
        super().__init__(num_chunks=num_chunks, **options)  # type: ignore[call-arg]

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
        if self.tier_counts.tier == HOT:
            report_decisions(stats)
        return stats
