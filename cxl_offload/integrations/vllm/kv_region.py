"""vLLM's shared offload region, in memory that was placed by a policy."""

from __future__ import annotations

import mmap

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from cxl_offload.memory import SharedRegion
from cxl_offload.memory.lost import survive_by_default

# Below vLLM's own logger, so that it is shown as vLLM's lines are.
_logger = init_logger(f"vllm.{__name__}")


class PlacedRegion(SharedOffloadRegion):  # type: ignore[misc]
    """What vLLM's workers and tiers use of a region, over a :class:`SharedRegion`.

    The constructor of the base class maps and faults in a file of its own, so it is not called;
    a test compares the attributes with those that it makes.

    Parameters
    ----------
    region
        At least ``num_chunks * kv_bytes_per_chunk`` bytes; closed by :meth:`cleanup`.
    rank
        Whose part of every chunk the worker views are; None for the scheduler, which sees all.
    cpu_page_size
        Bytes of one rank in a chunk.
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
    ) -> None:
        survive_by_default()
        self.region = region
        self.page_size = mmap.PAGESIZE
        self.num_chunks = num_chunks
        self._row_stride = kv_bytes_per_chunk
        self.total_size_bytes = num_chunks * kv_bytes_per_chunk
        self.mmap_path = str(region.path)
        self.rank = rank
        if rank is not None:
            self._worker_offset = rank * cpu_page_size
            self._worker_area_end = (rank + 1) * cpu_page_size
        # File and name are the region's to close and remove.
        self._creator = False
        self.fd = None
        self.mmap_obj: mmap.mmap | None = region.mapping
        self._base: torch.Tensor | None = torch.frombuffer(
            region.mapping, dtype=torch.int8, count=self.total_size_bytes
        )
        self._views: list[torch.Tensor] = []
        self._canonical_offset = 0
        self.is_pinned = False
        self.pinned_addresses: list[int] = []

    def cleanup(self) -> None:
        """Unpins and unmaps; removes the name if no other process holds it."""
        super().cleanup()
        try:
            self.region.close()
        except BufferError:
            _logger.warning("%s is still viewed; it goes with the process", self.mmap_path)
