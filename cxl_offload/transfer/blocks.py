"""Many scattered blocks in one launch, between the GPU and pinned host memory.

Needs the CUDA kernels, which are built when nvcc is at hand at install time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.memory import Bind, Memory

__all__ = ["BlockCopier", "cuda_kernels_path"]

_ALIGNMENT = 16

Addresses: TypeAlias = "Sequence[int] | NDArray[np.uint64]"


def cuda_kernels_path() -> Path | None:
    """The library of CUDA kernels of this installation, None when it was built without nvcc."""
    path = Path(_C.__file__).with_name("libcxl_offload_cuda.so")
    return path if path.exists() else None


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
        path = cuda_kernels_path()
        if path is None:
            raise ValueError("copy blocks: built without the CUDA kernels; install with nvcc")
        self._kernels = _C.CudaKernels(str(path))
        self._memory = memory
        self._node = node

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
        addresses = np.array([sources, targets], dtype=np.uint64)
        aligned = block_bytes % _ALIGNMENT == 0 and not (addresses % _ALIGNMENT).any()
        lists = self._memory.allocate(addresses.nbytes, Bind((self._node,)), pin=True)
        np.from_dlpack(lists)[:] = addresses.reshape(-1).view(np.uint8)
        # Once the kernel is queued the stream reads the lists; the pool waits for that.
        lists.record_stream(stream)
        self._kernels.copy_blocks(
            lists.address,
            lists.address + addresses.nbytes // 2,
            len(sources),
            block_bytes=block_bytes,
            aligned=bool(aligned),
            stream=stream,
        )
