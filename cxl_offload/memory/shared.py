"""Files in shared memory that outlived the processes that mapped them.

Memory of one process ends with it, however it ends. A file in ``/dev/shm`` does not: it keeps its
pages until somebody removes it. So every process of this package that maps one named
``cxl_offload_*.mmap`` keeps it open with a lock (``flock``), which the kernel drops when the
process is gone, killed or not. A file that nobody holds is a leftover; the next session says so
when it starts, and so does ``cxl-offload doctor``.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)

SHARED_ROOT = Path("/dev/shm")
"""Where shared memory is mounted; kept in memory, so it takes room of a node."""

_PATTERN = "cxl_offload_*.mmap"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no living process holds.

    Attributes
    ----------
    path
        Of the file.
    held_bytes
        Of memory that it keeps from everybody: pages that were written, not its length.
    owner
        Id of the user who owns the file. That user and root may remove it.
    """

    path: Path
    held_bytes: int
    owner: int

    @property
    def remedy(self) -> str:
        """The command that gives the memory back."""
        return f"rm {shlex.quote(str(self.path))}"

    def __str__(self) -> str:
        return f"{self.path} keeps {format_bytes(self.held_bytes)} and nobody uses it"


def find_leftovers(root: str | os.PathLike[str] = SHARED_ROOT) -> tuple[Leftover, ...]:
    """What ended processes left in shared memory, in the order of the names.

    Files of other users that may not be opened are not judged. Nothing is removed: another program
    may be about to open the file.
    """
    return tuple(_unheld(Path(root)))


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file of a folder that everybody may write to; never waits for anybody.

    Anything but a regular file is refused with OSError: a FIFO would wait for its other end.
    """
    careful = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        file = os.open(path, flags | careful, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:  # "too many levels" is not what a user did
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _unheld(root: Path) -> Iterator[Leftover]:
    for path in sorted(root.glob(_PATTERN)):
        try:
            file = open_regular(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            # Who maps it holds a shared lock. This one is gone again with the descriptor.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = os.fstat(file)
        except OSError:
            continue
        finally:
            os.close(file)
        if state.st_nlink:
            yield Leftover(path, 512 * state.st_blocks, state.st_uid)


def shared_free_bytes(root: str | os.PathLike[str] = SHARED_ROOT) -> int:
    """Bytes that new files in shared memory may take."""
    state = os.statvfs(root)
    return state.f_bavail * state.f_frsize


def file_system_of(path: str | os.PathLike[str]) -> str:
    """The type of the file system that a path is on, such as ``tmpfs``; empty: none is told."""
    wanted, found = Path(path).resolve(), (0, "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = Path(before.split()[4].replace("\\040", " "))
            if wanted.is_relative_to(point) and len(point.parts) >= found[0]:
                found = (len(point.parts), after.split()[0])  # the last mount hides those before
    return found[1]


def warn_of_leftovers(root: str | os.PathLike[str] = SHARED_ROOT) -> tuple[Leftover, ...]:
    """Logs a warning for each of :func:`find_leftovers`, and returns them."""
    found = find_leftovers(root)
    for leftover in found:
        _logger.warning(
            "a process ended without removing its shared memory: %s; %s", leftover, leftover.remedy
        )
    return found
