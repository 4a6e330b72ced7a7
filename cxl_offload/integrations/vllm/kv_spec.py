"""vLLM's offloading spec over memory placed by this package.

By name, where the plugin is installed: ``spec_name: cxl``. By path else: ``spec_name:
CxlOffloadingSpec`` with ``spec_module_path: cxl_offload.integrations.vllm.kv_spec``.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import replace
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cxl_offload.integrations.vllm.block_swap import tune_worker
from cxl_offload.integrations.vllm.kv_metrics import CountedChunks, metric_definitions
from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.kv_place import copy_cpus, device_node
from cxl_offload.integrations.vllm.kv_region import PlacedRegion
from cxl_offload.integrations.vllm.kv_worker import HostCopyWorker
from cxl_offload.memory import Preferred, SharedRegion, active
from cxl_offload.units import format_bytes

__all__ = ["CxlOffloadingSpec"]

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger(f"vllm.{__name__}")


class CountedManager(CountedChunks, CPUOffloadingManager):  # type: ignore[misc]
    """vLLM's manager of a pool of one tier, with counters."""


class CxlOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """KV blocks in host memory placed by policy, shared by all ranks of an engine.

    The scheduler's side is vLLM's own. On a GPU the workers are too, over our memory: it is placed
    before they pin it. Where vLLM runs on CPU, which its workers refuse, blocks are copied by
    :class:`HostCopyWorker`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        self.options = KvOptions.read(config.extra_config, active().machine)
        hot = self.options.hot
        extra = {**config.extra_config, "cpu_bytes_to_use": hot.nbytes}
        super().__init__(replace(config, extra_config=extra))
        self._worker: OffloadingWorker | None = None
        self._manager: OffloadingManager | None = None
        if self.kv_bytes_per_chunk and self.num_chunks == 0:
            raise ValueError(
                f"kv_connector_extra_config: cpu_bytes_to_use of {format_bytes(hot.nbytes)} holds "
                f"no chunk of {format_bytes(self.kv_bytes_per_chunk)}, which is "
                f"{self.blocks_per_chunk} KV blocks of all ranks; give more"
            )

    def _uses_shared_region(self) -> bool:
        return True

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Those of vLLM's own manager, which is used here, and the counters of the tiers."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def get_manager(self) -> OffloadingManager:
        """vLLM's own, which keeps the books of the pool, with counters."""
        if self._manager is None:
            self._manager = CountedManager(
                num_chunks=self.num_chunks,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                store_threshold=int(self.extra_config.get("store_threshold", 0)),
                max_tracker_size=int(self.extra_config.get("max_tracker_size", 64_000)),
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Copies for one rank, over the region that all ranks share."""
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = self._map_region(0 if self.replicated_layout else self.config.parallel.rank)
        try:
            if current_platform.is_cpu():
                cpus = copy_cpus(active(), self.options.copy_threads)
                return HostCopyWorker(kv_caches, self.blocks_per_chunk, region, cpus)
            from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

            worker = CPUOffloadingWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_cpu_chunks=self.num_chunks,
                mmap_region=region,
            )
            if current_platform.is_cuda():
                tune_worker(worker, active(), node=device_node(active()))
            return worker
        except BaseException:
            region.cleanup()
            raise

    def _map_region(self, rank: int | None) -> PlacedRegion:
        hot = self.options.hot
        nbytes = self.num_chunks * self.kv_bytes_per_chunk
        shared = SharedRegion(
            re.sub(r"[^\w.-]", "_", self.config.engine_id),
            nbytes,
            hot.policy,
            mappers=self._mappers(),
            pages=hot.pages,
        )
        if hot.policy is None and rank is not None:
            self._place_near(shared, rank)
        placement = shared.placement()
        where = ", ".join(
            f"node {node}: {format_bytes(count)}"
            for node, count in sorted(placement.granted.items())
        )
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

    def _mappers(self) -> int:
        return int(self.config.parallel.world_size)

    def _place_near(self, region: SharedRegion, rank: int) -> None:
        """Puts the pages of a rank's slots near its device; shared pages go to who comes first."""
        page = mmap.PAGESIZE
        first = rank * self.cpu_page_size_per_worker
        last = first + self.cpu_page_size_per_worker
        begin = first // page * page
        end = -(-last // page) * page
        region.place(
            Preferred((device_node(active()),)),
            offset=begin,
            part_bytes=end - begin,
            stride_bytes=self.kv_bytes_per_chunk,
            count=self.num_chunks,
        )
