"""Times copies between a GPU and a node, with any engine that makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from cxl_offload.profile.model import CopyProfile, Estimate, estimate
from cxl_offload.renamed import old_names
from cxl_offload.units import MIB

CopyDirection = Literal["h2d", "d2h"]

_SMALL_BYTES = 64
_LEAST_SAMPLES = 5


class CopyCall(Protocol):
    """Copies ``nbytes`` between the node's memory and the GPU, and returns when they are there.

    ``cxl-offload profile`` copies with the CUDA driver. With torch, on a host tensor of
    :func:`cxl_offload.empty` placed on the node with ``pin=True``::

        def copy(direction, nbytes):
            source, target = (host, gpu) if direction == "h2d" else (gpu, host)
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            torch.cuda.synchronize()
    """

    def __call__(self, direction: CopyDirection, nbytes: int) -> None: ...


def measure_copies(
    copy: CopyCall,
    *,
    gpu: str,
    node: int,
    pinned: bool,
    copy_bytes: int = 256 * MIB,
    seconds: float = 4.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CopyProfile:
    """Bandwidth of copies of ``copy_bytes`` and latency of copies of 64 bytes, both ways.

    The caller gives the call, from a buffer whose placement it has read back. The time includes
    whatever the call does, so keep it to the copy and the wait for it; calling into C++ itself
    adds less than a microsecond.

    Parameters
    ----------
    copy
        The copy; called with ``copy_bytes`` and with 64.
    gpu, node, pinned
        Written into the result as given.
    seconds
        In all, a quarter for each number; each is taken at least 5 times after one untimed call.
    clock
        Seconds.

    Raises
    ------
    ValueError
        ``copy_bytes`` is not above 64, or ``seconds`` is not above 0.
    """
    if copy_bytes <= _SMALL_BYTES or not seconds > 0:
        raise ValueError(
            f"measure copies of {copy_bytes} bytes for {seconds} s: give more than "
            f"{_SMALL_BYTES} bytes and a time above 0"
        )

    def bandwidth(direction: CopyDirection) -> Estimate:
        times = _times(copy, direction, copy_bytes, seconds / 4, clock)
        return estimate([copy_bytes / took for took in times])

    def latency(direction: CopyDirection) -> Estimate:
        times = _times(copy, direction, _SMALL_BYTES, seconds / 4, clock)
        return estimate([took * 1e9 for took in times])

    return CopyProfile(
        gpu=gpu,
        node=node,
        pinned=pinned,
        copy_bytes=copy_bytes,
        h2d_bandwidth_bytes_per_s=bandwidth("h2d"),
        d2h_bandwidth_bytes_per_s=bandwidth("d2h"),
        h2d_latency_ns=latency("h2d"),
        d2h_latency_ns=latency("d2h"),
    )


def _times(
    copy: CopyCall,
    direction: CopyDirection,
    nbytes: int,
    seconds: float,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds of copies one after the other, the first of them left out."""
    copy(direction, nbytes)
    samples: list[float] = []
    end = clock() + seconds
    while len(samples) < _LEAST_SAMPLES or clock() < end:
        begin = clock()
        copy(direction, nbytes)
        samples.append(clock() - begin)
    return samples


__getattr__ = old_names(__name__)
