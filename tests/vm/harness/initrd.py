"""The initial RAM disk: busybox, the modules and PID 1, as a cpio archive (newc)."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["write_initrd"]

_INIT = Path(__file__).with_name("init.sh")
_APPLETS = ("cat", "chroot", "echo", "insmod", "ip", "ls", "mkdir", "mount", "sh", "sleep")
_DIRECTORY, _REGULAR, _LINK = 0o040755, 0o100755, 0o120777


def write_initrd(target: Path, *, busybox: Path, modules: Sequence[Path]) -> None:
    """Writes the archive unless ``target`` is newer than all that goes into it."""
    sources = [busybox, _INIT, Path(__file__), *modules]
    newest = max(path.stat().st_mtime_ns for path in sources)
    if target.exists() and target.stat().st_mtime_ns > newest:
        return
    entries = [(name, _DIRECTORY, b"") for name in ("bin", "dev", "modules", "proc", "root", "sys")]
    entries.append(("bin/busybox", _REGULAR, busybox.read_bytes()))
    entries += [(f"bin/{name}", _LINK, b"busybox") for name in _APPLETS]
    entries += [(f"modules/{path.name}", _REGULAR, path.read_bytes()) for path in modules]
    entries.append(("init", _REGULAR, _INIT.read_bytes()))
    entries.append(("TRAILER!!!", 0, b""))
    records = (
        _record(number, name, mode, content)
        for number, (name, mode, content) in enumerate(entries, start=1)
    )
    partial = target.with_suffix(f".{os.getpid()}")  # guests boot beside each other
    partial.write_bytes(gzip.compress(b"".join(records), compresslevel=1))
    partial.replace(target)


def _record(number: int, name: str, mode: int, content: bytes) -> bytes:
    """One entry: thirteen fields of eight hexadecimal digits, the name, the content."""
    links = 1
    fields = (number, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)
