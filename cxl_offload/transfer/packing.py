"""Fewer bytes over a link: blocks of numbers as 4-bit or 8-bit codes in groups.

The format is described in csrc/transfer/packing.h. The CPU and the CUDA kernels give the same bits,
so a block packed by one can be unpacked by the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.plan.kv_types import GROUP
from cxl_offload.renamed import renamed_keywords
from cxl_offload.transfer.blocks import ALIGNMENT, Addresses, AddressLists, load_kernels

CodeName = Literal["int4", "fp8"]
ElementName = Literal["float16", "bfloat16", "float32"]

_CODES = {"int4": _C.Code.int4, "fp8": _C.Code.fp8}
_ELEMENTS = {
    "float16": _C.Element.float16,
    "bfloat16": _C.Element.bfloat16,
    "float32": _C.Element.float32,
}


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How numbers become codes.

    Parameters
    ----------
    code
        ``"int4"``: 16 steps between the least and the largest of a group, at 4.5 bits a number in
        groups of 64. ``"fp8"``: E4M3 scaled by the largest of a group, at 8.5 bits.
    element
        What the numbers are outside of packed blocks.
    group_elements
        32, 64, 128 or 256.

    Raises
    ------
    ValueError
        Another code, element or group.
    """

    code: CodeName
    element: ElementName = "float16"
    group_elements: int = GROUP

    def __post_init__(self) -> None:
        if self.code not in _CODES:
            raise ValueError(f"code {self.code!r}; known are {', '.join(_CODES)}")
        if self.element not in _ELEMENTS:
            raise ValueError(f"element {self.element!r}; known are {', '.join(_ELEMENTS)}")
        self.core()

    def core(self) -> _C.Packing:
        return _C.Packing(_CODES[self.code], _ELEMENTS[self.element], self.group_elements)

    def packed_bytes(self, elements: int) -> int:
        """Bytes of a packed block of ``elements`` numbers."""
        if elements < 0:
            raise ValueError(f"a block of {elements} elements")
        return self.core().packed_bytes(elements)


def pack(layout: PackedFormat, *, target: int, source: int, elements: int) -> None:
    """Packs a block on the CPU.

    Parameters
    ----------
    target, source
        Addresses of ``layout.packed_bytes(elements)`` bytes and of ``elements`` numbers.
    """
    layout.packed_bytes(elements)
    layout.core().pack(target=target, source=source, count=elements)


def unpack(layout: PackedFormat, *, target: int, source: int, elements: int) -> None:
    """The way back of :func:`pack`: ``source`` is the packed block."""
    layout.packed_bytes(elements)
    layout.core().unpack(target=target, source=source, count=elements)


class BlockPacker:
    """Packs and unpacks lists of equal blocks on the GPU, each list in one launch.

    Packed blocks may be in pinned host memory: the codes are what crosses the link.

    Parameters
    ----------
    session, node
        Where the lists of addresses are kept, pinned.
    layout
        The format of packed blocks.

    Raises
    ------
    ValueError
        This installation has no CUDA kernels, or there is no driver to pin memory with.
    """

    @renamed_keywords(memory="session")
    def __init__(self, session: Session, layout: PackedFormat, *, node: int) -> None:
        self._kernels = load_kernels()
        self._lists = AddressLists(session, node)
        self._layout = layout

    def pack(self, *, targets: Addresses, sources: Addresses, elements: int, stream: int) -> None:
        """Queues the packing of blocks of ``elements`` numbers.

        Parameters
        ----------
        sources
            Addresses of the numbers, in device memory or pinned host memory.
        targets
            Addresses of the packed blocks, multiples of 16, apart from each other and the sources.
        stream
            The stream's handle as an integer. The blocks must stay alive until it has run.

        Raises
        ------
        ValueError
            The lists differ in length, or a packed block is misaligned.
        OSError
            The GPU refused the launch.
        """
        self._queue(targets, sources, targets, elements, stream, unpack=False)

    def unpack(self, *, targets: Addresses, sources: Addresses, elements: int, stream: int) -> None:
        """The way back of :meth:`pack`: ``sources`` are the packed blocks."""
        self._queue(targets, sources, sources, elements, stream, unpack=True)

    def _queue(
        self,
        targets: Addresses,
        sources: Addresses,
        packed: Addresses,
        elements: int,
        stream: int,
        *,
        unpack: bool,
    ) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"pack {len(sources)} sources to {len(targets)} targets")
        self._layout.packed_bytes(elements)
        if len(sources) == 0 or elements == 0:
            return
        if (np.asarray(packed, dtype=np.uint64) % ALIGNMENT).any():
            raise ValueError(f"a packed block must begin at a multiple of {ALIGNMENT}")
        with self._lists.kept(targets=targets, sources=sources, stream=stream) as (first, second):
            self._kernels.pack_blocks(
                self._layout.core(),
                targets=first,
                sources=second,
                blocks=len(sources),
                count=elements,
                unpack=unpack,
                stream=stream,
            )
