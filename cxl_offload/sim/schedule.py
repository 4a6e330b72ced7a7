"""Building a trace: steps whose queues overlap, or the same work with nothing overlapped."""

from __future__ import annotations

from collections.abc import Mapping

from cxl_offload.renamed import old_names
from cxl_offload.sim.trace import Engine, Event, Trace
from cxl_offload.sim.workload import PlacedBytes


class TraceBuilder:
    """Appends events to a trace.

    Parameters
    ----------
    stage
        Node through which a drive is read and written.
    overlap
        Whether the queues of a step run side by side. Else every event is a step of its own.
    """

    def __init__(self, *, stage: int, overlap: bool) -> None:
        self.trace = Trace()
        self.phase = ""
        self._stage = stage
        self._overlap = overlap
        self._step = 0
        self._used = False

    def barrier(self) -> None:
        """All queues catch up; a step without events is none."""
        if self._used:
            self._step += 1
        self._used = False

    def add(
        self,
        queue: str,
        engine: Engine,
        kind: str,
        *,
        read: Mapping[int, int] | None = None,
        write: Mapping[int, int] | None = None,
        accelerator_bytes: int = 0,
        flops: float = 0.0,
    ) -> None:
        """One event, unless it moves and computes nothing."""
        reads = {node: count for node, count in (read or {}).items() if count}
        writes = {node: count for node, count in (write or {}).items() if count}
        if not (reads or writes or accelerator_bytes or flops):
            return
        self.trace.append(
            Event(
                self.phase, self._step, queue, engine, kind, reads, writes, accelerator_bytes, flops
            )
        )
        self._used = True
        if not self._overlap:
            self.barrier()

    def load(self, queue: str, kind: str, placed: PlacedBytes) -> None:
        """To the GPU, from the nodes and through the stage from the drive."""
        self.from_drive(queue, kind, placed.drive)
        host = placed.on_host(self._stage)
        self.add(queue, "h2d", kind, read=host, accelerator_bytes=sum(host.values()))

    def from_drive(self, queue: str, kind: str, nbytes: int) -> None:
        """From the drive into the stage."""
        self.add(queue, "nvme", kind, write={self._stage: nbytes})

    def to_drive(self, queue: str, kind: str, nbytes: int) -> None:
        """From the stage to the drive."""
        self.add(queue, "nvme", kind, read={self._stage: nbytes})


__getattr__ = old_names(__name__)
