"""Many scattered blocks at once, between the GPU and pinned host memory.

By our kernel, which is built when nvcc is at hand at install time, or by the driver in one batch.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.memory import Bind, Session
from cxl_offload.renamed import renamed_keywords

ALIGNMENT = 16

Addresses: TypeAlias = "Sequence[int] | NDArray[np.uint64]"


def cuda_kernels_path() -> Path | None:
    """The library of CUDA kernels of this installation, None when it was built without nvcc."""
    path = Path(_C.__file__).with_name("libcxl_offload_cuda.so")
    return path if path.exists() else None


def load_kernels() -> _C.CudaKernels:
    """The CUDA kernels of this installation.

    Raises
    ------
    ValueError
        It was built without them.
    """
    path = cuda_kernels_path()
    if path is None:
        raise ValueError(
            "move blocks by a kernel: built without the CUDA kernels; install with nvcc at hand"
        )
    return _C.CudaKernels(str(path))


class AddressLists:
    """Lists of addresses where the GPU can read them, alive until it has.

    Parameters
    ----------
    session, node
        Where they are kept, pinned; best on the node that the GPU is attached to.
    """

    def __init__(self, session: Session, node: int) -> None:
        self._session = session
        self._node = node

    @contextlib.contextmanager
    def kept(
        self, *, targets: Addresses, sources: Addresses, stream: int
    ) -> Iterator[tuple[int, int]]:
        """Addresses of both lists, the targets' first, for what is queued on ``stream`` inside the
        ``with`` block.
        """
        both = np.array([targets, sources], dtype=np.uint64)
        lists = self._session.allocate(both.nbytes, Bind((self._node,)), pin=True)
        np.from_dlpack(lists)[:] = both.reshape(-1).view(np.uint8)
        # Dropped after the launch: the pool waits for what the stream has queued by then.
        lists.record_stream(stream)
        yield lists.address, lists.address + both.nbytes // 2


class BlockCopier:
    """Copies lists of equal blocks, each list in one launch or one call of the driver.

    Parameters
    ----------
    session
        Where the lists of addresses are kept, pinned, so that the GPU can read them.
    node
        The node of those lists; best the one the GPU is attached to.
    kernel_below_bytes
        Smaller blocks are copied by our kernel, larger ones by the driver in one batch; which is
        quicker depends on the GPU and its link: :func:`measure_kernel_limit` finds the size. None
        uses the kernel for all blocks. Without the CUDA kernels everything is batched.

    Raises
    ------
    ValueError
        There is no driver to pin memory with.
    """

    @renamed_keywords(memory="session")
    def __init__(
        self, session: Session, *, node: int, kernel_below_bytes: int | None = None
    ) -> None:
        self._driver = session.gpu_driver()
        self._kernels = load_kernels() if cuda_kernels_path() is not None else None
        self._lists = AddressLists(session, node)
        self._kernel_below_bytes = kernel_below_bytes

    def uses_kernel(self, block_bytes: int) -> bool:
        """Whether blocks of this size are copied by our kernel."""
        limit = self._kernel_below_bytes
        return self._kernels is not None and (limit is None or block_bytes < limit)

    def copy(
        self, *, targets: Addresses, sources: Addresses, block_bytes: int, stream: int
    ) -> None:
        """Queues ``targets[i][:block_bytes] = sources[i][:block_bytes]`` for every i.

        Parameters
        ----------
        targets, sources
            Addresses in device memory, or in pinned host memory; arrays of uint64 are quickest.
            Targets must not overlap each other or any source.
        block_bytes
            Bytes of every block. Fastest when it and all addresses are multiples of 16.
        stream
            The handle, as an integer, of a stream that is not a default one. The copies are
            queued, not finished, on return; the blocks must stay alive until the stream has run
            them.

        Raises
        ------
        ValueError
            The lists differ in length, or the size is negative.
        OSError
            The GPU refused the launch.
        """
        if len(sources) != len(targets):
            raise ValueError(f"copy {len(sources)} sources to {len(targets)} targets")
        if block_bytes < 0:
            raise ValueError(f"copy blocks of {block_bytes} bytes")
        if len(sources) == 0 or block_bytes == 0:
            return
        origin = np.ascontiguousarray(sources, dtype=np.uint64)
        to = np.ascontiguousarray(targets, dtype=np.uint64)
        if self._kernels is None or not self.uses_kernel(block_bytes):
            self._driver.copy_blocks(
                targets=to.ctypes.data,
                sources=origin.ctypes.data,
                count=len(origin),
                block_bytes=block_bytes,
                stream=stream,
            )
            return
        aligned = block_bytes % ALIGNMENT == 0 and not any(
            (addresses % ALIGNMENT).any() for addresses in (origin, to)
        )
        with self._lists.kept(targets=to, sources=origin, stream=stream) as (first, second):
            self._kernels.copy_blocks(
                targets=first,
                sources=second,
                count=len(origin),
                block_bytes=block_bytes,
                aligned=aligned,
                stream=stream,
            )


def measure_kernel_limit(
    session: Session, host: int, device: int, room_bytes: int, *, node: int, rounds: int = 7
) -> int | None:
    """The size from which on batched copies are quicker than our kernel, measured both ways.

    Parameters
    ----------
    host, device
        Addresses of ``room_bytes`` of pinned host memory and of device memory, both overwritten.
    node
        As of :class:`BlockCopier`.
    rounds
        Measurements of each way at each size; their medians are compared.

    Returns
    -------
    int or None
        For ``kernel_below_bytes``: None if the kernel is quicker at every size up to 4 MiB, 0 if
        it is never, or is not built.
    """
    if cuda_kernels_path() is None:
        return 0
    driver = session.gpu_driver()
    ways = [
        BlockCopier(session, node=node),
        BlockCopier(session, node=node, kernel_below_bytes=0),
    ]
    stream = driver.create_stream()
    limit: int | None = None
    for block in [BASE_PAGE_BYTES << step for step in range(10, -1, -1)]:
        if block > room_bytes:
            continue
        places = np.arange(room_bytes // block, dtype=np.uint64) * np.uint64(block)
        ends = (places + np.uint64(host), places[::-1] + np.uint64(device))
        samples: list[list[float]] = [[], []]
        for turn in range(rounds + 1):
            for way in (0, 1) if turn % 2 else (1, 0):
                begin = time.perf_counter()
                for sources, targets in (ends, ends[::-1]):
                    ways[way].copy(
                        targets=targets, sources=sources, block_bytes=block, stream=stream
                    )
                driver.wait_stream(stream)
                if turn > 0:  # the first turn loads code and wakes the link
                    samples[way].append(time.perf_counter() - begin)
        kernel, batched = (statistics.median(each) for each in samples)
        if kernel <= batched:
            break
        limit = block
    driver.destroy_stream(stream)
    return 0 if limit == BASE_PAGE_BYTES else limit
