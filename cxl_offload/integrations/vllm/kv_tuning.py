"""Learns from the copies that requests wait for where the KV pool of the next start goes.

The pool is shared by processes and pinned, so that it does not move. What a placement is worth
shows in the time that a byte takes out of it.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingWorker

from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.kv_region import PlacedRegion
from cxl_offload.memory import Session
from cxl_offload.tune import NewRegions

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger(f"vllm.{__name__}")


class TimedLoads(OffloadingWorker):  # type: ignore[misc]
    """Another worker, whose loads are timed.

    Parameters
    ----------
    worker
        Does all the work.
    regions
        Gets seconds a byte of every load, with its bytes as the load that makes times comparable.
    """

    def __init__(self, worker: OffloadingWorker, regions: NewRegions) -> None:
        self.worker = worker
        self._regions = regions
        self._loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return bool(self.worker.submit_store(job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._loads.add(job_id)
        return bool(self.worker.submit_load(job_id, src_spec, dst_spec))

    def get_finished(self) -> list[Any]:
        results = self.worker.get_finished()
        for each in results:
            if each.job_id not in self._loads:
                continue
            self._loads.remove(each.job_id)
            if each.success and each.transfer_size and each.transfer_time:
                seconds = each.transfer_time / each.transfer_size
                self._regions.step(seconds, load=each.transfer_size)
        return list(results)

    def wait(self, job_ids: set[int]) -> None:
        self.worker.wait(job_ids)

    def shutdown(self) -> None:
        self.worker.shutdown()


def timed(
    worker: OffloadingWorker, region: PlacedRegion, options: KvOptions, session: Session
) -> OffloadingWorker:
    """A worker whose loads decide where the next start's pool goes; the worker without ``tune``."""
    if options.tune_state is None:
        return worker
    regions = NewRegions(
        session.machine,
        state=options.tune_state,
        places=options.tuned_policy,
        framework="vllm",
        logger=_logger,
    )
    granted = region.region.placement().granted
    regions.placed(sum(granted.get(node, 0) for node in regions.far) / sum(granted.values()))
    return TimedLoads(worker, regions)
