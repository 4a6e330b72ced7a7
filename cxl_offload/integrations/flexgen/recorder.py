"""What a run moved and computed, as events that a simulated machine can replay.

Bytes of host memory are asked from the pages of the very slice that was copied. What PyTorch
allocates by itself in between (transposed copies of K and V in CPU attention, masks being compared)
has no tier and is not recorded.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch

from cxl_offload.sim.trace import Engine, Event, Trace

Queue = Literal["load_weight", "load_cache", "store_cache", "hidden", "compute"]
_KINDS: Mapping[Queue, str] = {
    "load_weight": "weights",
    "load_cache": "kv",
    "store_cache": "kv",
    "hidden": "act",
    "compute": "act",
}
NodeBytes = Callable[[int, int], Mapping[int, int]]


class Recorder:
    """Collects the events between :meth:`start` and :meth:`stop`.

    A step lasts from one of FlexGen's barriers to the next; within it the queues run side by side.

    Parameters
    ----------
    bytes_per_node
        Where a range of host memory is.
    local_node
        Node of the CPUs that run this: where PyTorch's own buffers are.
    """

    def __init__(self, bytes_per_node: NodeBytes, *, local_node: int) -> None:
        self.trace = Trace()
        self.enabled = False
        self.local_node = local_node
        self._bytes_per_node = bytes_per_node
        self._queue: Queue = "compute"
        self._step = 0
        self._token = 0
        self._weights: dict[tuple[int, int], Mapping[int, int]] = {}

    def start(self) -> None:
        """Record from here, into an empty trace."""
        self.trace = Trace()
        self.enabled = True
        self._step = self._token = 0

    def stop(self) -> Trace:
        """Record no more; returns what was recorded."""
        self.enabled = False
        trace, self.trace = self.trace, Trace()
        self._weights.clear()
        return trace

    def weights_move(self) -> None:
        """Weights may lie elsewhere from now on: they are asked for again."""
        self._weights.clear()

    @contextlib.contextmanager
    def on(self, queue: Queue) -> Iterator[None]:
        """Copies made inside belong to ``queue``."""
        before, self._queue = self._queue, queue
        try:
            yield
        finally:
            self._queue = before

    def begin(self, token: int) -> None:
        """The loop starts on this token: 0 is the prompt, the others are decoding."""
        self._token = token

    def barrier(self) -> None:
        """All queues have caught up."""
        self._step += 1

    def host(self, view: torch.Tensor) -> Mapping[int, int]:
        """Bytes of a view of host memory on every node."""
        if self._queue != "load_weight" or not view.is_contiguous():
            return view_bytes(view, self._bytes_per_node)
        # Weights are asked for with every token, and move between tokens only.
        key = (view.data_ptr(), view.numel() * view.element_size())
        if key not in self._weights:
            self._weights[key] = self._bytes_per_node(*key)
        return self._weights[key]

    def copied(
        self,
        engine: Engine,
        *,
        source: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        accelerator_bytes: int = 0,
    ) -> None:
        """One copy; ``source`` and ``target`` are its ends in host memory, if any."""
        if not self.enabled:
            return
        self._append(
            engine,
            _KINDS[self._queue],
            read={} if source is None else self.host(source),
            write={} if target is None else self.host(target),
            accelerator_bytes=accelerator_bytes,
        )

    def buffered(self, engine: Engine, nbytes: int, *, into: bool) -> None:
        """One copy into, or out of, a buffer of PyTorch's or a relay, on the local node."""
        if not self.enabled or nbytes == 0:
            return
        here = {self.local_node: nbytes}
        self._append(
            engine,
            _KINDS[self._queue],
            read={} if into else here,
            write=here if into else {},
            accelerator_bytes=0 if engine in ("nvme", "cpu") else nbytes,
        )

    def computed(
        self,
        engine: Engine,
        *,
        flops: float,
        accelerator_bytes: int = 0,
        read: tuple[torch.Tensor, ...] = (),
        write: tuple[torch.Tensor, ...] = (),
        kind: str = "act",
    ) -> None:
        """One computation; ``read`` and ``write`` are the host memory the CPU used for it."""
        if not self.enabled:
            return
        with self.on("compute"):
            self._append(
                engine,
                kind,
                read=self._sum(read),
                write=self._sum(write),
                accelerator_bytes=accelerator_bytes,
                flops=flops,
            )

    def _sum(self, views: tuple[torch.Tensor, ...]) -> Mapping[int, int]:
        total: Counter[int] = Counter()
        for view in views:
            total.update(self.host(view))
        return dict(total)

    def _append(
        self,
        engine: Engine,
        kind: str,
        *,
        read: Mapping[int, int],
        write: Mapping[int, int],
        accelerator_bytes: int = 0,
        flops: float = 0.0,
    ) -> None:
        self.trace.append(
            Event(
                phase="prefill" if self._token == 0 else "decode",
                step=self._step,
                queue=self._queue,
                engine=engine,
                tensor_kind=kind,
                read_bytes=dict(read),
                write_bytes=dict(write),
                accelerator_bytes=accelerator_bytes,
                flops=flops,
            )
        )


def view_bytes(view: torch.Tensor, bytes_per_node: NodeBytes) -> Mapping[int, int]:
    """Bytes of the elements of a view on every node, gaps between its rows left out."""
    size = view.element_size()
    if view.numel() == 0:
        return {}
    if view.is_contiguous():
        return bytes_per_node(view.data_ptr(), view.numel() * size)
    span = 1 + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    around = bytes_per_node(view.data_ptr(), span * size)
    if len(around) == 1:
        return {node: view.numel() * size for node in around}
    total: Counter[int] = Counter()
    for row in view:
        total.update(view_bytes(row, bytes_per_node))
    return dict(total)
