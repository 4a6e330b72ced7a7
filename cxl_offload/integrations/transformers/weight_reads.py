"""Weights that lie in a mapped file are read from the file to their place, by several threads."""

from __future__ import annotations

import json
import os
import struct
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from cxl_offload.memory.copies import any_copies
from cxl_offload.memory.whole import copying
from cxl_offload.objects.load_parts import READING, part_of_load
from cxl_offload.tensor import copy_whole
from cxl_offload.tensor_bytes import host_ranges
from cxl_offload.transfer.file_reads import FileReads
from cxl_offload.transfer.mapped_files import file_part_at

LEAST_BYTES = 1 << 20
"""Of a smaller weight, finding its file costs more than reading it gains."""

_HEADER_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it
_FOUND_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error)


def ask_for_first_pages(folder: Path) -> None:
    """Have the page cache read what a load looks at in the mapping of files of safetensors.

    That is their headers, small weights, and the first byte of every other one, which torch looks
    at while it makes a tensor of mapped memory. Each look would wait for a whole readahead, 16 MiB
    on some drives, all of which is read past the page cache later. The kernel reads what was asked
    for meanwhile. A file that cannot be read is left to who loads it.
    """
    for path in filter(Path.is_file, folder.glob("*.safetensors")):  # to open a pipe would wait
        with suppress(*_FOUND_UNREADABLE), path.open("rb", buffering=0) as file:
            number = file.fileno()
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
            (length,) = _HEADER_LENGTH.unpack(os.pread(number, _HEADER_LENGTH.size, 0))
            header = os.pread(number, min(length, _LONGEST_HEADER), _HEADER_LENGTH.size)
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    nbytes = end - begin if end - begin < LEAST_BYTES else 1
                    begin += _HEADER_LENGTH.size + length
                    os.posix_fadvise(number, begin, nbytes, os.POSIX_FADV_WILLNEED)


def reads_of_weights() -> FileReads:
    """Reads of weights; the time in which any of them goes on is that of reading."""
    return FileReads(lambda: part_of_load(READING, 0))


def start_filling(reads: FileReads, target: torch.Tensor, weight: torch.Tensor) -> None:
    """Give ``target`` the elements of ``weight``, at the latest when ``reads`` was waited for.

    Parameters
    ----------
    reads
        Keep ``target`` until then.
    target
        A contiguous tensor in a tier, of the shape and dtype of ``weight``.
    weight
        A plain tensor on the CPU. Where it lies in a file that is mapped and nobody wrote to it,
        its bytes are read from the file, and not through the mapping; others are there at once.

    Raises
    ------
    MemoryLostError
        As :func:`cxl_offload.tensor.copy_whole`.
    OSError
        The file, or that of a weight before it, cannot be read, or became shorter.
    """
    same = target.dtype == weight.dtype and weight.is_contiguous() and target.is_contiguous()
    part = None
    if same and weight.nbytes >= LEAST_BYTES and not any_copies():
        part = file_part_at(weight.data_ptr(), weight.nbytes)
    with part_of_load(READING, weight.nbytes):
        if part is None:
            copy_whole(target, weight)
            return
        checks = ExitStack()
        checks.enter_context(copying(source=list, target=lambda: host_ranges([target])))
        reads.start(part, target=target.data_ptr(), done=checks.close)
