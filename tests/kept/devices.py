"""A Device-DAX device where there is none: a file that refuses what a device refuses.

What only a device does (its driver, its locks, its loss) is tested on one, in
``tests/vm/guest_dax.py``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.kept import device, place
from cxl_offload.memory.watched_mapping import WatchedMapping
from tests.memory.dax_devices import ALIGN, SIZE, write_device

PATH = Path("/dev/dax0.0")


class DeviceMapping(WatchedMapping):
    """Of whole pages of the device, and without ``msync``."""

    def __new__(cls, file: int, nbytes: int, **options: Any) -> DeviceMapping:
        assert nbytes % ALIGN == 0
        assert options["page_bytes"] == ALIGN
        return super().__new__(cls, file, nbytes, **options)  # type: ignore[return-value]

    def flush(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "a device has no msync")


def device_file(root: Path, name: str = "dax0.0") -> Path:
    """The file that is the memory of a device."""
    return root / "dev" / name


def stand_in(monkeypatch: pytest.MonkeyPatch, root: Path, **options: Any) -> Path:
    """Puts ``dax0.0`` below a folder, in the place of this machine's devices."""
    write_device(root, "dax0.0", **options)
    device_file(root).chmod(0o600)
    monkeypatch.setattr(device, "ROOT", root)
    monkeypatch.setattr(device, "is_node_of", lambda state, name: True)
    monkeypatch.setattr(place, "WatchedMapping", DeviceMapping)
    for name in ("pread", "ftruncate", "posix_fallocate"):
        monkeypatch.setattr(os, name, not_of_a_device(getattr(os, name), root))
    return PATH


def not_of_a_device(call: Callable[..., Any], root: Path) -> Callable[..., Any]:
    """A system call that a device does not have; files keep it."""

    def called(file: int, *rest: Any) -> Any:
        if os.path.samestat(os.fstat(file), device_file(root).stat()):
            raise OSError(errno.EINVAL, "a device cannot do that")
        return call(file, *rest)

    return called


def fill_device(root: Path, data: bytes, at: int = 0) -> None:
    """What somebody wrote there before."""
    with device_file(root).open("r+b") as file:
        file.seek(at)
        file.write(data)


def bytes_of(root: Path, nbytes: int = SIZE) -> bytes:
    with device_file(root).open("rb") as file:
        return file.read(nbytes)
