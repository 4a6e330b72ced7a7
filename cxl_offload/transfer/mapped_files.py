"""Which part of a file a range of memory maps: read from there, it is here sooner.

A library that maps a checkpoint gives its tensors as addresses in that mapping. A copy from there
takes a page fault for every few pages, waits for the drive one readahead at a time, and leaves the
whole file in the page cache of the near node.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct

import numpy as np

from cxl_offload.transfer.file_reads import FilePart

_MAPS = "/proc/self/maps"
# ioctl PROCMAP_QUERY of linux/fs.h (Linux 6.11): the mapping at an address, without a list of all.
_PROCMAP_QUERY = 0xC0686611
_QUERY = struct.Struct("=9Q4I2Q")
_LONGEST_PATH = os.pathconf("/", "PC_PATH_MAX")
# Bits of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst).
_THERE, _OF_FILE = 1 << 63 | 1 << 62, 1 << 61


def file_part_at(address: int, nbytes: int) -> FilePart | None:
    """The part of a file whose bytes a range of this process's memory has.

    Returns
    -------
    FilePart or None
        None where the range is no mapping of a file that is still there under its name, or where
        something of it was written to: then memory says something else than the file.
    """
    found = _mapping_at(address)
    if found is None:
        return None
    start, end, offset, inode, path = found
    is_file = bool(inode) and path.startswith("/") and address + nbytes <= end
    if not is_file or _any_written(address, nbytes):
        return None
    try:
        if os.stat(path).st_ino != inode:
            return None
    except OSError:  # removed, or not for this user
        return None
    return FilePart(path, inode, offset + address - start, nbytes)


_Mapping = tuple[int, int, int, int, str]
"""(start, end, offset in the file, inode, path)"""


def _mapping_at(address: int) -> _Mapping | None:
    with open(_MAPS, "rb", buffering=0) as maps:
        try:
            return _asked_mapping(maps.fileno(), address)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
        return _listed_mapping(maps.readall(), address)


def _asked_mapping(maps: int, address: int) -> _Mapping:
    name = ctypes.create_string_buffer(_LONGEST_PATH)
    fields = [_QUERY.size, 0, address, *[0] * 6, 0, 0, len(name), 0, ctypes.addressof(name), 0]
    query = bytearray(_QUERY.pack(*fields))
    fcntl.ioctl(maps, _PROCMAP_QUERY, query)
    _, _, _, start, end, _, _, offset, inode, *_ = _QUERY.unpack(query)
    return start, end, offset, inode, os.fsdecode(name.value)


def _listed_mapping(listed: bytes, address: int) -> _Mapping | None:
    """From the list of all mappings, as kernels before 6.11 have it."""
    for line in listed.splitlines():
        bounds, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in bounds.split(b"-"))
        if start <= address < end:
            name = path[0].replace(b"\\012", b"\n") if path else b""
            return start, end, int(offset, 16), int(inode), os.fsdecode(name)
    return None


def _any_written(address: int, nbytes: int) -> bool:
    """Whether a page became memory of this process's own; where the kernel does not say: yes."""
    first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            read = pagemap.read((last - first + 1) * 8)
    except OSError:
        return True
    if read is None or len(read) != (last - first + 1) * 8:
        return True
    entries = np.frombuffer(read, np.uint64)
    own = (entries & np.uint64(_THERE) != 0) & (entries & np.uint64(_OF_FILE) == 0)
    return bool(own.any())
