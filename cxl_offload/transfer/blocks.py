"""Many scattered blocks in one launch, between the GPU and pinned host memory.

Needs the CUDA kernels, which are built when nvcc is at hand at install time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.memory import Bind, Memory

__all__ = ["AddressLists", "Addresses", "BlockCopier", "cuda_kernels_path", "load_kernels"]

_ALIGNMENT = 16

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
    memory, node
        Where they are kept, pinned; best on the node that the GPU is attached to.
    """

    def __init__(self, memory: Memory, node: int) -> None:
        self._memory = memory
        self._node = node

    @contextlib.contextmanager
    def kept(
        self, sources: Addresses, targets: Addresses, stream: int
    ) -> Iterator[tuple[int, int]]:
        """Addresses of both lists, for what is queued on ``stream`` inside the ``with`` block."""
        both = np.array([sources, targets], dtype=np.uint64)
        lists = self._memory.allocate(both.nbytes, Bind((self._node,)), pin=True)
        np.from_dlpack(lists)[:] = both.reshape(-1).view(np.uint8)
        # Dropped after the launch: the pool waits for what the stream has queued by then.
        lists.record_stream(stream)
        yield lists.address, lists.address + both.nbytes // 2


class BlockCopier:
    """Copies lists of equal blocks, each list in one launch.

    Parameters
    ----------
    memory
        Where the lists of addresses are kept, pinned, so that the GPU can read them.
    node
        The node of those lists; best the one the GPU is attached to.

    Raises
    ------
    ValueError
        When this installation has no CUDA kernels, or no driver to pin memory with.
    """

    def __init__(self, memory: Memory, *, node: int) -> None:
        self._kernels = load_kernels()
        self._lists = AddressLists(memory, node)

    def copy(
        self, sources: Addresses, targets: Addresses, *, block_bytes: int, stream: int
    ) -> None:
        """Queues ``targets[i][:block_bytes] = sources[i][:block_bytes]`` for every i.

        Parameters
        ----------
        sources, targets
            Addresses in device memory, or in pinned host memory; arrays of uint64 are quickest.
            Targets must not overlap each other or any source.
        block_bytes
            Bytes of every block. Fastest when it and all addresses are multiples of 16.
        stream
            The stream's handle as an integer. The copies are queued, not finished, on return;
            the blocks must stay alive until the stream has run them.

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
        aligned = block_bytes % _ALIGNMENT == 0 and not any(
            (np.asarray(addresses, dtype=np.uint64) % _ALIGNMENT).any()
            for addresses in (sources, targets)
        )
        with self._lists.kept(sources, targets, stream) as (first, second):
            self._kernels.copy_blocks(
                first,
                second,
                len(sources),
                block_bytes=block_bytes,
                aligned=aligned,
                stream=stream,
            )
