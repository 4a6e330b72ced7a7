"""Kernel modules in the order in which they can be loaded, without depmod and modprobe."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.vm.harness.errors import HarnessError

__all__ = ["MODULES", "load_order"]

# 9p over virtio for the file systems, then what brings up CXL memory and Device-DAX, then
# persistent memory, as Device-DAX and with ext4. What a kernel has built in, or does not have yet
# (dax_cxl before 6.3), needs no loading.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p"),
    *("cxl_acpi", "cxl_pci", "cxl_mem", "cxl_port", "dax_cxl", "device_dax", "kmem"),
    *("nfit", "nd_pmem", "dax_pmem", "crc32c_generic", "ext4"),
)

_SUFFIXES = (".ko", ".ko.xz")


def load_order(tree: Path, wanted: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The wanted modules, and before each one those that it depends on.

    Parameters
    ----------
    tree
        ``lib/modules/VERSION`` of an unpacked kernel package.

    Yields
    ------
    tuple of str and bytes
        Name and uncompressed content.
    """
    files = {
        _plain(path.name.partition(".")[0]): path
        for path in tree.rglob("*.ko*")
        if path.name.endswith(_SUFFIXES)
    }
    if not files:
        raise HarnessError(f"{tree} has no kernel modules")
    done: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        if name in done or name not in files:
            return
        done.add(name)
        content = _read(files[name])
        for dependency in _dependencies(content):
            yield from visit(dependency)
        yield name, content

    for name in wanted:
        yield from visit(_plain(name))


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def _dependencies(content: bytes) -> list[str]:
    """The ``depends=`` entry that the kernel's build writes into every module."""
    match = re.search(rb"\0depends=([^\0]*)\0", content)
    return [_plain(name) for name in match[1].decode().split(",") if name] if match else []
