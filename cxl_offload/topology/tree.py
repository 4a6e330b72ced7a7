"""The one way into /sys and /proc: every read goes through a root, so a captured tree is input.

A missing file is normal (old kernel, no driver) and reads as ``None``. A file that is there but
cannot be read is said in :attr:`Tree.notes`, once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PCI_DEVICES = "/sys/bus/pci/devices"

_INTEGER = re.compile(r"-?[0-9]+")


class Tree:
    """Files below ``root``, addressed by their path on a live system (``/sys/...``)."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.realpath(root))
        self.notes: list[str] = []

    @property
    def live(self) -> bool:
        """Whether this is the running system rather than a captured tree."""
        return self.root == Path("/")

    def text(self, path: str) -> str | None:
        """The stripped text of a file, ``None`` if it is absent or unreadable."""
        try:
            return self._path(path).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.note(f"cannot read {path}: {error.strerror}")
            return None

    def integer(self, path: str, *, base: int = 10) -> int | None:
        """The whole number in a file; anything else is noted and reads as ``None``."""
        text = self.text(path)
        if text is None:
            return None
        try:
            return int(text, base)
        except ValueError:
            self.note(f"{path} holds {text[:40]!r}, not a number")
            return None

    def names(self, path: str, pattern: str) -> list[str]:
        """Names in a folder that match a regular expression, in natural order."""
        try:
            found = [name for name in os.listdir(self._path(path)) if re.fullmatch(pattern, name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.note(f"cannot list {path}: {error.strerror}")
            return []
        return sorted(found, key=_natural)

    def exists(self, path: str) -> bool:
        """Whether the path is there, links followed; a path that may not be looked at is not."""
        return os.path.exists(self._path(path))

    def real(self, path: str) -> str | None:
        """The path behind links, as on the live system; ``None`` if absent or outside the root."""
        resolved = Path(os.path.realpath(self._path(path)))
        if not os.path.exists(resolved) or not resolved.is_relative_to(self.root):
            return None
        return "/" + str(resolved.relative_to(self.root))

    def link_name(self, path: str) -> str | None:
        """The last part of what a link points to, e.g. the driver of ``.../driver``."""
        try:
            return os.path.basename(os.readlink(self._path(path)))
        except OSError:
            return None

    def note(self, text: str) -> None:
        """Tell the reader, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _path(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    parts = re.split(r"([0-9]+)", name)
    return tuple((int(part), "") if _INTEGER.fullmatch(part) else (-1, part) for part in parts)
