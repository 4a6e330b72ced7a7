"""Files of one user, which one process writes and others may read.

The lock of the writer is one of the open file description (``F_OFD_SETLK``): the kernel ends it
with its process, and others can ask for it without taking it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from cxl_offload.memory.shared import open_regular


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file that is this user's alone; never waits, never follows a link.

    Raises
    ------
    OSError
        It is missing, a link, no regular file, or of another user, or others may open it.
    """
    # No creation here: the kernel refuses it for other users' files, without saying why.
    file = open_regular(path, flags & ~os.O_CREAT)
    try:
        check_private(os.fstat(file), path)
    except BaseException:
        os.close(file)
        raise
    return file


def check_private(state: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raises PermissionError where a file is another user's, or others may open it."""
    why, mode = "", stat.S_IMODE(state.st_mode)
    if state.st_uid != os.geteuid():
        why = f"it belongs to user {state.st_uid}"
        if stat.S_ISCHR(state.st_mode):
            why += f"; give it to yours: sudo chown $USER {path}"
    elif mode & 0o077:
        remedy = "chmod 600" if stat.S_ISCHR(state.st_mode) else "remove it, or chmod 600"
        why = f"others may open it (mode {mode:o}); {remedy}"
    if why:
        raise PermissionError(errno.EPERM, why, str(path))


def make_private(path: str | os.PathLike[str]) -> int:
    """Makes a new, empty file of mode 600.

    Raises
    ------
    FileExistsError
        The name is taken.
    """
    file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(file, 0o600)  # whatever the umask
    return file


def _flock(kind: int) -> bytes:
    # struct flock of 64-bit Linux: type, whence, start, length (0: all), pid
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def try_lock(file: int) -> bool:
    """Takes the lock of the writer; False where another holds it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(file: int) -> None:
    """Lets others write; a mapping of the file holds the lock too, and may stay."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK))


def is_locked(file: int) -> bool:
    """Whether a process holds the lock of the writer."""
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)
