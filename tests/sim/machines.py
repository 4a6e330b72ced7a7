"""A machine with round numbers, so that times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cxl_offload import _C
from cxl_offload.sim import Event
from cxl_offload.topology import Access, DmaPath, Drive, Gpu, Link, Machine, Node, NodeKind

GB = 10**9


def machine(**changes: Any) -> Machine:
    """DRAM at 100 GB/s (stores 50), CXL at 20, a GPU behind 10 GB/s, a drive of 2 and 1 GB/s."""
    kinds = (NodeKind.DRAM, NodeKind.DRAM, NodeKind.CXL)
    fields: dict[str, Any] = {
        "name": "round-numbers",
        "nodes": tuple(
            Node(id=at, kind=kinds[at], cpus=((0,), (1,), ())[at], capacity_bytes=1 << 40)
            for at in range(3)
        ),
        "accesses": (
            Access(0, 0, 100.0, 100.0, 100 * GB, 50 * GB),
            Access(0, 1, 200.0, 200.0, 40 * GB, 40 * GB),
            Access(0, 2, 300.0, 300.0, 20 * GB, 20 * GB),
            Access(1, 1, 100.0, 100.0, 100 * GB, 50 * GB),
        ),
        "gpus": (
            Gpu(
                "gpu0",
                node=0,
                link=Link(10 * GB, 10 * GB, setup_s=0.001),
                memory_bandwidth_bytes_per_s=1000 * GB,
                peak_flops_per_s=1e12,
            ),
        ),
        "dma_paths": (DmaPath("gpu0", 2, 5 * GB, 5 * GB, extra_latency_ns=1e6),),
        "drives": (Drive("nvme", 1 << 40, 2 * GB, 1 * GB),),
        "simulated": True,
    }
    return Machine(**{**fields, **changes})


def speeds(
    demands: Sequence[Mapping[int, float]], losses: Mapping[int, float] | None = None
) -> list[float]:
    """What the core gives each of several events: 1 where its own largest demand alone bounds it.

    Parameters
    ----------
    demands
        Of every event, number of a resource to the seconds that the event alone would occupy it;
        each with a largest demand above 0.
    losses
        Resource -> largest share of it that congestion costs.
    """
    losses = losses or {}
    jobs = []
    for demand in demands:
        largest = max(demand.values())
        jobs.append([(resource, part / largest) for resource, part in demand.items() if part > 0])
    count = 1 + max((resource for job in jobs for resource, _ in job), default=0)
    return _C.share_resources(jobs, [losses.get(resource, 0.0) for resource in range(count)])


def event(
    engine: Any,
    read: Mapping[int, int] | None = None,
    write: Mapping[int, int] | None = None,
    *,
    step: int = 0,
    queue: str = "q",
    phase: str = "decode",
    **fields: Any,
) -> Event:
    """An event with defaults for what a test is not about."""
    return Event(
        phase=phase,
        step=step,
        queue=queue,
        engine=engine,
        tensor_kind="kv",
        read_bytes=read or {},
        write_bytes=write or {},
        **fields,
    )
