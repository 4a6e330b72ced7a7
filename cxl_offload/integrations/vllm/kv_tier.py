"""The cold tier: chunks in memory of its own, behind the hot one, by vLLM's tiering interface.

vLLM writes every chunk that reaches the hot tier through to this one, so that a chunk the hot tier
drops is demoted and not lost, and promotes it when it is asked for again. All methods run in the
scheduler's process and copy nothing: that is up to a thread of its own. Copies into the hot tier,
which requests wait for, go first; those out of it wait, up to a number of bytes, and are refused
beyond it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from cxl_offload.errors import MemoryLostError
from cxl_offload.integrations.vllm.kv_books import ColdBooks, ReadBooks
from cxl_offload.integrations.vllm.kv_copies import CopyLists, CopyQueue
from cxl_offload.integrations.vllm.kv_facts import late_facts
from cxl_offload.integrations.vllm.kv_kept import (
    KeptChunks,
    KeptToRead,
    damaged,
    open_kept,
)
from cxl_offload.integrations.vllm.kv_metrics import metric_definitions
from cxl_offload.integrations.vllm.kv_options import ColdTier
from cxl_offload.integrations.vllm.kv_place import copy_cpus
from cxl_offload.integrations.vllm.kv_read import FACTS_KEY, wrong
from cxl_offload.kept import KeptLayout, Placing
from cxl_offload.memory import current_session
from cxl_offload.memory.lost import add_owner, is_gone, is_lost, survive_by_default
from cxl_offload.units import format_bytes

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger(f"vllm.{__name__}")

COLD = "cold"
"""Label of the tier in the counters."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A copy under way.

    ``is_whole``: all chunks that were asked for are in it. ``damaged``: numbers of those that are
    not what was written, known when it has finished.
    """

    keys: list[OffloadKey]
    slots: list[int]
    context: ReqContext
    is_load: bool
    is_whole: bool
    damaged: list[int] = field(default_factory=list)


class ColdTierManager(SecondaryTierManager):  # type: ignore[misc]
    """A tier of vLLM over memory placed by this package; registered as the tier type ``cxl``.

    Options beside those of the base class are those of
    :class:`~cxl_offload.integrations.vllm.kv_options.ColdTier`.
    """

    medium: ClassVar[Medium] = Medium.CPU
    tells_itself: ClassVar[bool] = True
    """Chunks whose memory failed are found when they are copied."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        session = current_session()
        self.options = ColdTier.read(options, session.machine)
        tier = self.options.tier
        self.slots = tier.nbytes // self.block_size_bytes
        if self.slots == 0:
            raise ValueError(
                f"kv_connector_extra_config: cold.bytes of {format_bytes(tier.nbytes)} holds no "
                f"chunk of {format_bytes(self.block_size_bytes)}; give more"
            )
        self.kept = None if self.options.kept is None else self._open_kept(self.options.kept)
        if self.kept is None:
            assert tier.policy is not None
            nbytes = self.slots * self.block_size_bytes
            self.memory: Any = session.allocate(nbytes, tier.policy, pages=tier.pages)
        else:
            self.memory = self.kept
        # The address alone: an array would keep the view from being released.
        self._hot = int(np.asarray(primary_kv_view).ctypes.data)
        self.books = self._make_books(
            offloading_spec.kv_events_config.enable_kv_cache_events, self.kept
        )
        survive_by_default()
        add_owner(self)
        self._copies = CopyQueue(copy_cpus(session, self.options.copy_threads), "cxl-offload-cold")
        self._gone = False
        self._jobs: dict[int, _Job] = {}
        self._done: list[JobResult] = []
        self._contexts: dict[str, ReqContext] = {}
        placement = session.placement(self.memory.address, self.memory.nbytes)
        _logger.info("cold KV tier of %d chunks: %s", self.slots, placement)

    def _open_kept(self, path: Path) -> KeptChunks | KeptToRead:
        """The store of chunks that outlive the engine."""
        spec: Any = self._offloading_spec
        early = spec.extra_config.get(FACTS_KEY)
        if early is None:
            raise wrong("cold.persist", "needs spec_name 'cxl' and this package's plugin in vLLM")
        tier = self.options.tier
        return open_kept(
            path,
            KeptLayout(self.block_size_bytes, self.slots),
            late_facts(spec.config, early),
            Placing(current_session(), tier.policy, tier.pages),
        )

    def _make_books(self, events: bool, kept: KeptChunks | KeptToRead | None) -> Any:
        sizes = {"tier": COLD, "chunk_bytes": self.block_size_bytes, "num_chunks": self.slots}
        if isinstance(kept, KeptToRead):
            return ReadBooks(kept, **sizes)
        books = ColdBooks(cache_policy=self.options.tier.eviction, enable_events=events, **sizes)
        if kept is not None:
            books.restore(kept.entries)
            _logger.info("cold KV tier: %d chunks of an earlier engine", len(kept.entries))
        return books

    @property
    def copy_seconds(self) -> float:
        """Of one chunk, as measured lately; 0 before the first."""
        return self._copies.seconds_per_byte * float(self.block_size_bytes)

    @property
    def _is_gone(self) -> bool:
        """Whether the device or file behind the tier has left; the first time the log says so.

        Chunks would come to lie in memory that the tier was not given.
        """
        if not self._gone and is_gone(self.memory.address, self.memory.nbytes):
            self._gone = True
            where = self.options.kept or self.options.tier.policy
            _logger.error(
                "cold KV tier: %s is gone; no chunk is found or kept there until the engine has "
                "started again",
                where,
            )
        return self._gone

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._is_gone:
            return LookupResult.MISS
        found = self.books.lookup(key, req_context)
        return LookupResult.RETRY if found is LookupResult.HIT_PENDING else found

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        keys = list(job.keys)
        room = (self.options.pending_bytes - self._copies.waiting_bytes) // self.block_size_bytes
        # What finds no room in the queue or the tier is the end of a prefix, never its beginning.
        wanted = keys[: 0 if self._is_gone else max(0, min(room, self.slots))]
        rest = keys[len(wanted) :]
        missed = sum(self.books.lookup(key, None) is LookupResult.MISS for key in rest)
        self.books.tier_counts.add("refused", missed)
        context = self._context(job.req_context)
        stored = self.books.prepare_store(wanted, context) if wanted else None
        if stored is None or not stored.keys_to_store:
            self._done.append(JobResult(job.job_id, success=True))
            return
        hot = dict(zip(keys, job.chunk_ids.tolist(), strict=True))
        sources = np.array([hot[key] for key in stored.keys_to_store], dtype=np.int64)
        slots = stored.store_spec.block_ids
        self._jobs[job.job_id] = made = _Job(
            stored.keys_to_store, slots.tolist(), context, is_load=False, is_whole=True
        )
        self._submit(job.job_id, made, self._slots(slots), self._chunks(sources))

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        context = self._context(job.req_context)
        # Since the lookup a store of the same step may have evicted some.
        there = [self.lookup(key, context) is LookupResult.HIT for key in job.keys]
        keys = [key for key, is_there in zip(job.keys, there, strict=True) if is_there]
        if not keys:
            self._done.append(JobResult(job.job_id, success=False))
            return
        slots = self.books.prepare_load(keys, context).block_ids
        self._jobs[job.job_id] = made = _Job(
            keys, slots.tolist(), context, is_load=True, is_whole=all(there)
        )
        targets = self._chunks(job.chunk_ids[np.array(there)])
        self._submit(job.job_id, made, targets, self._slots(slots))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done, self._done = self._done, []
        for each in self._copies.finished():
            job = self._jobs.pop(each.id)
            good = job.keys
            if isinstance(each.failure, MemoryLostError):
                job.damaged.extend(self._lost(job))
            if job.is_load:
                self.books.complete_load(job.keys, job.context)
                good = self._take_out_damaged(job)
            else:
                self.books.complete_store(job.keys, job.context, each.failure is None)
            if each.failure is not None:
                _logger.error("cold KV tier: a copy failed: %s", each.failure)
            done.append(
                JobResult(
                    each.id,
                    success=each.failure is None and job.is_whole and not job.damaged,
                    successful_keys=good if job.is_load and each.failure is None else None,
                    transfer_time=each.seconds,
                    transfer_bytes=each.nbytes,
                )
            )
        return done

    def _take_out_damaged(self, job: _Job) -> list[OffloadKey]:
        """Drops what is lost or not what its checksum says; returns the rest."""
        self.books.tier_counts.add("damaged", len(job.damaged))
        for number in job.damaged:
            key = job.keys[number]
            if self.books.drop(key) and self.kept is not None:
                self.kept.drop(job.slots[number], key)
        return [key for number, key in enumerate(job.keys) if number not in job.damaged]

    def _lost(self, job: _Job) -> list[int]:
        """Numbers of the chunks whose memory failed; others of their copy are asked for again."""
        size = self.block_size_bytes
        return [
            number
            for number, slot in enumerate(job.slots)
            if job.is_load and is_lost(self.memory.address + slot * size, size)
        ]

    def named(self, address: int) -> tuple[str, int] | None:
        """As of the owner of memory (:class:`cxl_offload.memory.lost.MemoryOwner`)."""
        memory = self.memory
        is_here = memory is not None and 0 <= address - memory.address < memory.nbytes
        return ("the cold KV tier", memory.address) if is_here else None

    def restore(self, address: int, nbytes: int) -> bool:
        """Nobody has lost chunks: they are computed again."""
        return False

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.books.touch(keys, self._context(req_context))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        context = self._contexts[req_context.req_id] = ReqContext(req_context.req_id)
        # Shared, so that prefixes keep their order.
        context._offload_key_positions = req_context._offload_key_positions
        self.books.on_new_request(context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.books.on_request_finished(self._context(req_context))
        self._contexts.pop(req_context.req_id, None)

    def take_events(self) -> Iterable[Any]:
        yield from self.books.take_events()

    def drain_jobs(self) -> None:
        """Waits for every copy; results are there for :meth:`get_finished_jobs`."""
        self._copies.wait()

    def forget(self) -> None:
        """Drops every chunk: the model's weights may be others from now on."""
        self.books.reset_cache()
        if self.kept is not None:
            self.kept.forget()

    def shutdown(self) -> None:
        self._copies.stop()
        self.memory = None
        if self.kept is not None:
            self.kept.close()

    def get_stats(self) -> Any:
        """Our counters alone: vLLM's gauges of a pool are the hot tier's."""
        stats = OffloadingConnectorStats()
        self.books.tier_counts.report(stats)
        return stats

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    def _context(self, req_context: ReqContext) -> ReqContext:
        """A request's state for our books: vLLM's books of the hot tier use the same slot."""
        found = self._contexts.get(req_context.req_id)
        return ReqContext(req_context.req_id) if found is None else found

    def _submit(
        self, job_id: int, job: _Job, targets: NDArray[np.uint64], sources: NDArray[np.uint64]
    ) -> None:
        sizes = np.full(targets.size, self.block_size_bytes, dtype=np.int64)
        # What requests wait for is no reason to refuse others.
        waits = 0 if job.is_load else int(sizes.sum())
        kept = self.kept
        digests = None if kept is None or not job.is_load else kept.digests(job.slots, job.keys)

        def begin() -> CopyLists:
            if isinstance(kept, KeptChunks) and not job.is_load:
                kept.renew(job.slots)
            return targets, sources, sizes

        def end() -> None:
            if digests is not None:
                job.damaged.extend(damaged(targets.tolist(), self.block_size_bytes, digests))
            elif isinstance(kept, KeptChunks):
                kept.keep(job.slots, job.keys)

        self._copies.submit(job_id, begin, nbytes=waits, urgent=job.is_load, then=end)

    def _slots(self, ids: NDArray[Any]) -> NDArray[np.uint64]:
        return self._rows(self.memory.address, ids)

    def _chunks(self, ids: NDArray[Any]) -> NDArray[np.uint64]:
        return self._rows(self._hot, ids)

    def _rows(self, address: int, ids: NDArray[Any]) -> NDArray[np.uint64]:
        rows: NDArray[np.int64] = address + ids.astype(np.int64) * self.block_size_bytes
        return rows.view(np.uint64)
