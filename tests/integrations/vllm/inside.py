"""What tests ask of vLLM's worker processes, also through ``LLM.collective_rpc``."""

from __future__ import annotations

import os
from typing import Any


def copy_worker() -> Any:
    """The copy worker of an engine whose worker is this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker


def pool(_worker: Any = None) -> dict[str, Any]:
    """Where the pages of the pool are, and how large it is."""
    region = copy_worker().region.region
    placement = region.placement()
    return {
        "granted": {str(node): count for node, count in placement.granted.items()},
        "nbytes": region.nbytes,
        "named": region.path.exists(),
        "worker": type(copy_worker()).__name__,
        "pid": os.getpid(),
        "shared": sorted(
            line.split()[4] for line in open("/proc/self/maps") if "cxl_offload_kv_" in line
        ),
    }


def damage(_worker: Any = None) -> None:
    """Every chunk of the pool gets the bytes of another one."""
    region = copy_worker().region
    rows = region._base.view(region.num_chunks, -1)
    rows.copy_(rows.roll(1, 0))
