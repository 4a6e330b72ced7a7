"""vLLM's offloading spec over memory placed by this package.

By name, where the plugin is installed: ``spec_name: cxl``. By path else: ``spec_name:
CxlOffloadingSpec`` with ``spec_module_path: cxl_offload.integrations.vllm.kv_spec``.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from cxl_offload.integrations.vllm.block_swap import tune_worker
from cxl_offload.integrations.vllm.kv_admission import Admission
from cxl_offload.integrations.vllm.kv_admitted import AdmittedStores
from cxl_offload.integrations.vllm.kv_eviction import CostPolicy
from cxl_offload.integrations.vllm.kv_metrics import HOT, CountedChunks, metric_definitions
from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.kv_place import copy_cpus, device_node
from cxl_offload.integrations.vllm.kv_plugin import TIER_TYPE, register_names
from cxl_offload.integrations.vllm.kv_region import PlacedRegion
from cxl_offload.integrations.vllm.kv_tier import ColdTierManager
from cxl_offload.integrations.vllm.kv_tuning import timed
from cxl_offload.integrations.vllm.kv_worker import HostCopyWorker
from cxl_offload.memory import Preferred, SharedRegion, current_session
from cxl_offload.units import format_bytes

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger(f"vllm.{__name__}")


class CountedManager(AdmittedStores, CountedChunks, CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of a pool of one tier, with counters."""


class CountedPrimary(CountedChunks, CPUPrimaryTierOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of the first tier of several, with counters."""


class TieredManager(AdmittedStores, TieringOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of several tiers."""

    def reset_cache(self) -> None:
        """Also drops what the cold tier holds, which vLLM keeps: it may be of other weights."""
        super().reset_cache()
        for tier in self.secondary_tiers:
            if isinstance(tier, ColdTierManager):
                tier.forget()


def _tier_configs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The tiers behind the hot one, as vLLM's factory takes them."""
    cold = config.get("cold")
    own = [] if cold is None else [{"type": TIER_TYPE, **cold}]
    return own + list(config.get("secondary_tiers", []))


class CxlOffloadingSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """KV blocks in host memory placed by policy, shared by all ranks of an engine.

    The scheduler's side is vLLM's own, with one tier or several. On a GPU the workers are too,
    over our memory: it is placed before they pin it. Where vLLM runs on CPU, which its workers
    refuse, blocks are copied by :class:`HostCopyWorker`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        register_names()
        self.options = KvOptions.read(config.extra_config, current_session().machine)
        hot = self.options.hot
        tiers = _tier_configs(dict(config.extra_config))
        extra = {
            **config.extra_config,
            "cpu_bytes_to_use": hot.nbytes,
            "secondary_tiers": tiers,
        }
        super().__init__(replace(config, extra_config=extra))
        self._worker: OffloadingWorker | None = None
        self._manager: OffloadingManager | None = None
        if self.kv_bytes_per_chunk and self.num_chunks == 0:
            raise ValueError(
                f"kv_connector_extra_config: cpu_bytes_to_use of {format_bytes(hot.nbytes)} holds "
                f"no chunk of {format_bytes(self.kv_bytes_per_chunk)}, which is "
                f"{self.blocks_per_chunk} KV blocks of all ranks; give more"
            )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Those of vLLM's own managers, which are used here, and the counters of the tiers."""
        register_names()
        tiers = _tier_configs(extra_config)
        if tiers:
            stock = super().build_metric_definitions({**extra_config, "secondary_tiers": tiers})
        else:
            stock = CPUOffloadingSpec.build_metric_definitions(extra_config)
        return {**stock, **metric_definitions()}

    def get_manager(self) -> OffloadingManager:
        """vLLM's own, which keeps the books of the tiers, with counters."""
        if self._manager is None:
            tiered = bool(self.secondary_tier_configs)
            self._manager = self._make_tiers() if tiered else self._make_manager()
        return self._manager

    def _books(self) -> dict[str, Any]:
        return {
            "tier": HOT,
            "chunk_bytes": self.kv_bytes_per_chunk,
            "num_chunks": self.num_chunks,
            "cache_policy": self.eviction_policy,
            "cache_policy_module_path": self.cache_policy_module_path,
            "enable_events": self.kv_events_config.enable_kv_cache_events,
        }

    def _make_manager(self) -> OffloadingManager:
        manager = CountedManager(
            **self._books(),
            store_threshold=int(self.extra_config.get("store_threshold", 0)),
            max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
        )
        self._set_cost(manager, None, lambda: 0.0)
        self._set_admission(manager, manager, self.num_chunks)
        return manager

    def _make_tiers(self) -> OffloadingManager:
        region = self._map_region(None)
        primary: CountedPrimary | None = None
        tiers: list[Any] = []
        try:
            primary = CountedPrimary(mmap_region=region, **self._books())
            for config in self.secondary_tier_configs:
                tiers.append(
                    SecondaryTierFactory.create_secondary_tier(
                        config, primary.get_kv_memoryview(), self
                    )
                )
            cold = next((tier for tier in tiers if isinstance(tier, ColdTierManager)), None)
            if cold is not None:
                self._set_cost(primary, cold.books, lambda: cold.copy_seconds)
                self._set_cost(cold.books, primary, lambda: cold.copy_seconds)
            manager = TieredManager(primary_tier=primary, secondary_tiers=tiers)
            behind = [tier.slots for tier in tiers if isinstance(tier, ColdTierManager)]
            self._set_admission(manager, primary, max([self.num_chunks, *behind]))
            return manager
        except BaseException:
            for tier in reversed(tiers):
                tier.shutdown()
            region.cleanup() if primary is None else primary.shutdown()
            raise

    def _set_cost(self, books: Any, other: Any, copy_seconds: Callable[[], float]) -> None:
        """Tells an eviction policy by cost what it costs to have a chunk again."""
        policy, rate = books._policy, self.options.prefill_tokens_per_s
        if not isinstance(policy, CostPolicy) or rate is None:
            return
        computing: float = max(self.tokens_per_block) * self.blocks_per_chunk / rate

        def cost(key: OffloadKey) -> float:
            if other is None or other.lookup(key, None) is not LookupResult.HIT:
                return computing
            return min(copy_seconds(), computing)

        policy.cost = cost
        if other is not None:
            other.on_change = policy.rank_again

    def _set_admission(self, manager: AdmittedStores, first: Any, chunks: int) -> None:
        """Declines what few read again, unless all is to be stored.

        Parameters
        ----------
        first
            The books of the first tier.
        chunks
            Of the largest tier.
        """
        if self.options.admission == "all":
            return
        if len(self.tokens_per_block) != 1:
            # Windows and states are no beginning of a request that comes back.
            _logger.info("KV offload: this model has several kinds of KV blocks; all are stored")
            return
        chunk_tokens = self.tokens_per_block[0] * self.blocks_per_chunk
        admission = Admission(chunks, chunk_tokens)
        manager.admit_by(admission, first.tier_counts, first._policy.get)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Copies for one rank, over the region that all ranks share."""
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        rank = self.config.parallel.rank
        region = self._map_region(0 if self.replicated_layout else rank)
        try:
            worker = self._copies(kv_caches, region)
            # Ranks copy like shares of every chunk: the first decides for all.
            return timed(worker, region, self.options, current_session()) if rank == 0 else worker
        except BaseException:
            region.cleanup()
            raise

    def _copies(self, kv_caches: CanonicalKVCaches, region: PlacedRegion) -> OffloadingWorker:
        """This package's worker where vLLM runs on CPU, else vLLM's own."""
        canonical = self.config.canonical_layout
        if current_platform.is_cpu():
            if canonical:
                raise ValueError(
                    "kv_connector_extra_config: canonical_layout needs a GPU; leave it out"
                )
            cpus = copy_cpus(current_session(), self.options.copy_threads)
            return HostCopyWorker(kv_caches, self.blocks_per_chunk, region, cpus)
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        if canonical:
            self._validate_canonical_refs(kv_caches)
        worker = CPUOffloadingWorker(
            kv_caches=kv_caches,
            blocks_per_chunk=self.blocks_per_chunk,
            num_cpu_chunks=self.num_chunks,
            mmap_region=region,
            canonical_layout=canonical,
        )
        if current_platform.is_cuda():
            tune_worker(worker, current_session(), node=device_node(current_session()))
        return worker

    def _map_region(self, rank: int | None) -> PlacedRegion:
        """The pool, in a worker or (rank None) in the scheduler, which sees it whole."""
        hot = self.options.hot
        nbytes = self.num_chunks * self.kv_bytes_per_chunk
        # All workers map it, and the scheduler where there are more tiers.
        mappers = int(self.config.parallel.world_size) + bool(self.secondary_tier_configs)
        shared = SharedRegion(
            re.sub(r"[^\w.-]", "_", self.config.engine_id),
            nbytes,
            hot.policy,
            mappers=mappers,
            pages=hot.pages,
        )
        if hot.policy is None and rank is not None:
            self._place_near(shared, rank)
        places = sorted(shared.placement().granted.items())
        where = ", ".join(f"node {node}: {format_bytes(count)}" for node, count in places)
        _logger.info("KV pool of %s (%s): %s", format_bytes(nbytes), hot.policy or "near", where)
        for note in shared.notes:
            _logger.warning("KV pool: %s", note)
        return PlacedRegion(
            shared,
            num_chunks=self.num_chunks,
            rank=rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )

    def _place_near(self, region: SharedRegion, rank: int) -> None:
        """Puts the pages of a rank's slots near its device; shared pages go to who comes first."""
        page = mmap.PAGESIZE
        first = rank * self.cpu_page_size_per_worker
        begin = first // page * page
        end = -(-(first + self.cpu_page_size_per_worker) // page) * page
        region.place(
            Preferred((device_node(current_session()),)),
            offset=begin,
            part_bytes=end - begin,
            stride_bytes=self.kv_bytes_per_chunk,
            count=self.num_chunks,
        )
