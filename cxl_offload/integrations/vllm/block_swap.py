"""Blocks between the paged KV cache of a GPU and scattered host blocks: by what measures quickest.

vLLM hands lists of addresses and sizes to one function for each direction. Here that function is
vLLM's own, the driver's batched copy by this package, or this package's kernel; once, when the
worker starts, all of them copy the same blocks in turns, and another than vLLM's is taken only
where its median is better by more than a margin. So it is never slower than vLLM's by more than
the noise of that measurement.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cxl_offload.memory import Session
from cxl_offload.transfer import BlockCopier
from cxl_offload.transfer.blocks import cuda_kernels_path

_logger = logging.getLogger("vllm.cxl_offload")

SwapBlocks = Callable[..., None]
"""``swap(sources, targets, sizes, is_src_access_order_any=...)``, as of vLLM: CPU tensors of
addresses and bytes; queues the copies on the current stream."""

STOCK = "vLLM's own"

MARGIN = 0.02
"""Another than vLLM's own must be better by this fraction."""

ROUNDS = 15

_BATCH_BYTES = 64 << 20
"""Copied in a measurement, at most: a prompt of some thousand tokens."""


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


class CopierSwap:
    """A :class:`~cxl_offload.transfer.BlockCopier` that is called as vLLM calls its function.

    Parameters
    ----------
    copier
        Copies lists of blocks of one size.
    stream
        Gives the handle of the stream to queue on.
    """

    def __init__(self, copier: BlockCopier, stream: Callable[[], int]) -> None:
        self._copier = copier
        self._stream = stream

    def __call__(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        """Queues all copies; in order of the stream, whatever order is allowed."""
        origin = sources.numpy().view(np.uint64)
        to = targets.numpy().view(np.uint64)
        nbytes = sizes.numpy()
        stream = self._stream()
        for size in np.unique(nbytes):
            these = nbytes == size
            self._copier.copy(
                targets=to[these], sources=origin[these], block_bytes=int(size), stream=stream
            )


@dataclass(frozen=True, slots=True)
class SwapChoice:
    """What was chosen for one direction, and the median seconds of every contender."""

    name: str
    swap: SwapBlocks
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {took * 1e6:.0f} us" for name, took in self.seconds.items())
        return f"{self.name} ({times})"


def choose_swap(
    contenders: Mapping[str, SwapBlocks],
    copy: Callable[[SwapBlocks], None],
    *,
    rounds: int = ROUNDS,
    margin: float = MARGIN,
    clock: Callable[[], float] = time.perf_counter,
) -> SwapChoice:
    """The quickest of the contenders, or vLLM's own where no other is clearly quicker.

    Parameters
    ----------
    contenders
        By name; :data:`STOCK` is one of them.
    copy
        Copies a fixed list of blocks by a contender, and waits until it is done.

    Raises
    ------
    Exception
        Whatever vLLM's own raises; another one that fails is left out, with a warning.
    """
    alive = dict(contenders)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        names = list(alive) if turn % 2 else list(reversed(alive))
        for name in names:
            begin = clock()
            try:
                copy(alive[name])
            except (OSError, ValueError, MemoryError) as error:
                if name == STOCK:
                    raise
                _logger.warning("KV copies by %s are left out: %s", name, error)
                del alive[name]
                continue
            if turn > 0:  # the first turn loads code and wakes the link
                samples[name].append(clock() - begin)
    medians = {name: statistics.median(samples[name]) for name in alive}
    best = min(medians, key=lambda name: medians[name])
    if medians[best] >= medians[STOCK] * (1 - margin):
        best = STOCK
    return SwapChoice(best, alive[best], medians)


class _TorchLane:
    """A stream of torch's, on which contenders are measured."""

    def __init__(self) -> None:
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(self, queue: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            queue()
        self._stream.synchronize()


def tune_worker(
    worker: Any,
    session: Session,
    *,
    node: int,
    run: Callable[[Callable[[], None]], None] | None = None,
    stream: Callable[[], int] = _current_stream,
) -> dict[str, SwapChoice]:
    """Measures both directions of vLLM's worker, and gives each the quickest function.

    It copies blocks of the KV cache to the pool and the same blocks back, before any request: the
    cache is unchanged afterwards.

    Parameters
    ----------
    worker
        vLLM's ``CPUOffloadingWorker``, with a pool that is pinned.
    session
        Where lists of addresses are kept, pinned.
    node
        The node nearest to the GPU.
    run
        Queues copies on a stream and waits for them; by default on one of torch's.
    stream
        As of :class:`CopierSwap`.

    Returns
    -------
    dict
        Direction to what was chosen; empty where vLLM's worker is not as tested.
    """
    handlers: dict[str, Any] = {
        "store": getattr(worker, "_store_handler", None),
        "load": getattr(worker, "_load_handler", None),
    }
    if not all(callable(getattr(each, "_swap_blocks_batch", None)) for each in handlers.values()):
        _logger.warning("KV copies stay vLLM's own: its worker is not as tested")
        return {}
    if not getattr(getattr(worker, "_mmap_region", None), "is_pinned", False):
        _logger.warning("KV copies stay vLLM's own: the pool is not pinned")
        return {}
    try:
        ours = _ours(session, node, stream)
    except (OSError, ValueError, MemoryError) as error:
        _logger.warning("KV copies stay vLLM's own: %s", error)
        return {}
    run = _TorchLane().run if run is None else run
    found = {}
    for direction, handler in handlers.items():  # stores first: loads bring back what they stored
        lists = _all_blocks(handler)
        if lists is None:
            continue
        copy = functools.partial(_copy, run, lists)
        choice = choose_swap({STOCK: handler._swap_blocks_batch, **ours}, copy)
        handler._swap_blocks_batch = choice.swap
        found[direction] = choice
        _logger.info("KV blocks, %s: %s", direction, choice)
    return found


def _copy(run: Callable[[Callable[[], None]], None], lists: Any, swap: SwapBlocks) -> None:
    run(lambda: swap(*lists))


def _ours(session: Session, node: int, stream: Callable[[], int]) -> dict[str, SwapBlocks]:
    made: dict[str, SwapBlocks] = {}
    ways = {"batched": 0, "kernel": None} if cuda_kernels_path() is not None else {"batched": 0}
    for name, kernel_below_bytes in ways.items():
        copier = BlockCopier(session, node=node, kernel_below_bytes=kernel_below_bytes)
        made[name] = CopierSwap(copier, stream)
    return made


def _all_blocks(handler: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Sources, targets and sizes that pair the first blocks of cache and pool, tensor by tensor."""
    sources, targets, sizes = [], [], []
    room = _BATCH_BYTES // max(1, len(handler.src_tensors))
    for source, target in zip(handler.src_tensors, handler.dst_tensors, strict=True):
        page = min(source.shape[1], target.shape[1])
        # one block of each chunk: as scattered as blocks of different chunks are
        count = min(source.shape[0], target.shape[0], max(1, room // page))
        rows = torch.arange(count, dtype=torch.int64)
        sources.append(source.data_ptr() + rows * source.stride(0))
        targets.append(target.data_ptr() + rows * target.stride(0))
        sizes.append(torch.full((count,), page, dtype=torch.int64))
    if not sources or not sum(each.numel() for each in sources):
        return None
    return torch.cat(sources), torch.cat(targets), torch.cat(sizes)
