"""vLLM's managers, with an admission rule in front of their stores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)

from cxl_offload.integrations.vllm.kv_admission import Admission, RequestPrefix
from cxl_offload.integrations.vllm.kv_metrics import TierCounts, report_admission


class AdmittedStores:
    """Beside the manager that vLLM's scheduler talks to; comes first among the bases.

    Without :meth:`admit_by` it changes nothing.
    """

    _admission: Admission | None = None
    _counts: TierCounts
    _holds: Callable[[OffloadKey], Any]

    def admit_by(
        self,
        admission: Admission,
        counts: TierCounts,
        holds: Callable[[OffloadKey], Any],
    ) -> None:
        """Stores only what the rule admits from now on.

        Parameters
        ----------
        counts
            Counts chunks that were declined.
        holds
            Whether the first tier has a chunk: its books hear of those as ever.
        """
        self._admission, self._counts, self._holds = admission, counts, holds

    def on_new_request(self, req_context: ReqContext, **where: Any) -> RequestOffloadingContext:
        manager: Any = super()
        found: RequestOffloadingContext = manager.on_new_request(req_context, **where)
        if self._admission is not None and found.policy is OffloadPolicy.REQUEST_LEVEL:
            _prefix(req_context).is_whole = True
        return found

    def lookup(self, key: OffloadKey, req_context: ReqContext | None, **where: Any) -> LookupResult:
        # A tier that asks for others (``where``) is no request that waits.
        if self._admission is not None and req_context is not None and not where:
            end = req_context.get_offload_key_position(key)
            self._admission.looked_up(_prefix(req_context), end)
        manager: Any = super()
        found: LookupResult = manager.lookup(key, req_context, **where)
        return found

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        keys = list(keys)
        if self._admission is not None:
            known = [req_context.get_offload_key_position(key) for key in keys]
            ends = [end for end in known if end is not None]
            self._admission.loaded(_prefix(req_context), keys, ends)
        manager: Any = super()
        return manager.prepare_load(keys, req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        manager: Any = super()
        if self._admission is None:
            asked: PrepareStoreOutput | None = manager.prepare_store(keys, req_context)
            return asked
        keys = list(keys)
        ends = [req_context.get_offload_key_position(key) for key in keys]
        may = self._admission.admit(_prefix(req_context), keys, ends)
        wanted = [key for key, is_in in zip(keys, may, strict=True) if is_in or self._holds(key)]
        found: PrepareStoreOutput | None = manager.prepare_store(wanted, req_context)
        if found is not None:  # else vLLM asks again
            self._counts.add("declined", len(keys) - len(wanted))
        return found

    def get_stats(self) -> OffloadingConnectorStats | None:
        manager: Any = super()
        stats: OffloadingConnectorStats | None = manager.get_stats()
        if self._admission is None:
            return stats
        stats = stats or OffloadingConnectorStats()
        report_admission(stats, self._admission.share)
        return stats


def _prefix(req_context: ReqContext) -> RequestPrefix:
    """What the rule knows of a request, kept where vLLM's managers keep theirs."""
    found: RequestPrefix | None = req_context.get_state(RequestPrefix)
    if found is None:
        found = RequestPrefix()
        req_context.set_state(found)
    return found
