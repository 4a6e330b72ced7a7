"""The stores of a machine: which there are, whether their blocks are right, and their end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.kept.device import find_device, is_device, kept_devices
from cxl_offload.kept.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    KeptEntry,
    KeptHeader,
    is_right,
)
from cxl_offload.kept.place import DevicePlace, Read, place_of
from cxl_offload.kept.private_file import is_locked, open_private
from cxl_offload.memory.shared import SHARED_ROOT, file_system_of
from cxl_offload.memory.shared_region import LONGEST_NAME

_PREFIX, _SUFFIX = "cxl_offload_kept_", ".kv"
_ENTRIES_AT_ONCE = 8192


def kept_path(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The file of a store in a folder (None: ``/dev/shm``), or the device that the name names.

    Raises
    ------
    ValueError
        The name cannot be part of a file's name, or is a device and a folder is given.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name of kept blocks is a text, not {type(name).__name__}")
    if is_device(name):
        if root is not None:
            raise ValueError(f"{name} is a device, which lies in no folder")
        return Path(name)
    fits = 0 < len(name.encode(errors="replace")) <= LONGEST_NAME
    if not fits or "/" in name or not name.isprintable():
        raise ValueError(
            f"name {name[:80]!r} of kept blocks: 1 to {LONGEST_NAME} bytes of characters that "
            "can be printed, without a slash; or a device, such as /dev/dax0.0"
        )
    return Path(SHARED_ROOT if root is None else root) / f"{_PREFIX}{name}{_SUFFIX}"


def kept_folder(given: object) -> Path | None:
    """The folder that an option names for stores; None: none is named.

    Raises
    ------
    ValueError
        It is no path of a folder that is there.
    """
    if given is None:
        return None
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ValueError(f"the path of a folder is a text, not {type(given).__name__}")
    if not text:
        raise ValueError("an empty text is no folder; leave it out, or give '.' for this one")
    try:
        folder = Path(text).expanduser()
        is_there = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, too long, no rights
        raise ValueError(getattr(error, "strerror", None) or str(error)) from None
    if not is_there:
        raise ValueError("there is no such folder")
    return folder


def takes_policy(path: Path) -> bool:
    """Whether a policy can place the pages of a store there: files on a tmpfs."""
    return not is_device(path) and file_system_of(path.parent) == "tmpfs"


def why_not_placed(path: Path) -> str:
    """For people who give a policy for a store that takes none."""
    if is_device(path):
        return f"what is kept on {path} is where that device is"
    return f"pages of files in {path.parent} are where its file system puts them"


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A store in a folder, or on a device.

    Attributes
    ----------
    facts
        What its blocks are blocks of.
    blocks, slots
        How many there are (not yet read), and how many there can be.
    held_bytes
        Of memory or disk that the file takes, or of the device.
    in_use
        Whether a process writes it at the moment.
    problem
        Why it cannot be used; empty: it can.
    """

    name: str
    path: Path
    facts: Mapping[str, str]
    blocks: int
    slots: int
    block_bytes: int
    held_bytes: int
    in_use: bool
    problem: str


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """What reading every block of a store found.

    Attributes
    ----------
    right
        Blocks that are what was written.
    damaged
        Keys of those that are not, as hexadecimal digits, by slot.
    unreadable
        Slots whose entry in the index is damaged, or was not finished when its writer ended.
    """

    path: Path
    right: int
    damaged: Mapping[int, str]
    unreadable: tuple[int, ...] = ()


def find_kept(root: str | os.PathLike[str] = SHARED_ROOT) -> tuple[KeptFile, ...]:
    """Every file that is named as a store, in the order of the names."""
    paths = sorted(Path(root).glob(f"{_PREFIX}*{_SUFFIX}"))
    return tuple(look_at(path) for path in paths)


def find_kept_devices() -> tuple[KeptFile, ...]:
    """The stores on Device-DAX devices that this user may open, by name.

    Devices with anything else on them are left out; :func:`look_at` says of each what is wrong.
    """
    found = []
    for path in kept_devices():
        try:
            if DevicePlace(find_device(path)).has_store():
                found.append(look_at(path))
        except OSError:
            continue
    return tuple(found)


def look_at(path: Path) -> KeptFile:
    """What is in a file or on a device, good or bad."""
    # Anybody may make a file there, of any name: shown as it is, it could write to a terminal.
    name = path.name[len(_PREFIX) : -len(_SUFFIX)].encode("unicode_escape").decode()
    name = str(path) if is_device(path) else name
    nothing: dict[str, str] = {}
    try:
        place = place_of(path)
        file = place.open(os.O_RDONLY)
    except OSError as error:
        return KeptFile(name, path, nothing, 0, 0, 0, 0, False, error.strerror or str(error))
    try:
        held, in_use = 512 * os.fstat(file).st_blocks, is_locked(file)
        with place.reading(file) as (read, nbytes):
            try:
                header = place.header(read, nbytes)
            except ValueError as error:
                return KeptFile(name, path, nothing, 0, 0, 0, held, in_use, str(error))
            blocks = sum(1 for _, entry in _entries(read, header) if entry is not None)
        layout = header.layout
        held = layout.file_bytes if is_device(path) else held
        return KeptFile(
            name, path, header.facts, blocks, layout.slots, layout.block_bytes, held, in_use, ""
        )
    finally:
        os.close(file)


_NO_ENTRY = bytes(ENTRY_BYTES)


def _entries(read: Read, header: KeptHeader) -> Iterator[tuple[int, KeptEntry | None]]:
    """Every slot that the index says something of; None: what it says cannot be believed."""
    slots = header.layout.slots
    for first in range(0, slots, _ENTRIES_AT_ONCE):
        count = min(_ENTRIES_AT_ONCE, slots - first)
        raw = read(count * ENTRY_BYTES, HEADER_BYTES + first * ENTRY_BYTES)
        for at in range(0, len(raw) - ENTRY_BYTES + 1, ENTRY_BYTES):
            slot = first + at // ENTRY_BYTES
            said = raw[at : at + ENTRY_BYTES]
            if said != _NO_ENTRY:
                yield slot, KeptEntry.unpack(said, slot, header.id)


def _entry_now(read: Read, header: KeptHeader, slot: int) -> KeptEntry | None:
    raw = read(ENTRY_BYTES, header.layout.entry_at(slot))
    return KeptEntry.unpack(raw.ljust(ENTRY_BYTES, b"\0"), slot, header.id)


def verify_kept(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> VerifiedFile:
    """Reads every block of a store and compares it with its checksum; changes nothing.

    A block that its writer replaces meanwhile is not judged, nor are unreadable entries while a
    process writes the store: it may be in the middle of them. ``progress`` is told the slot it is
    at, and how many there are.

    Raises
    ------
    OSError
        There is none, or it is not this user's alone.
    ValueError
        It is damaged as a whole.
    """
    place = place_of(path)
    file = place.open(os.O_RDONLY)
    try:
        with place.reading(file) as (read, nbytes):
            try:
                header = place.header(read, nbytes)
            except ValueError as error:
                raise ValueError(f"kept blocks in {path}: {error}") from None
            right, damaged, unreadable = _verified(read, header, progress)
        if is_locked(file):  # the writer may be in the middle of them
            unreadable = []
        return VerifiedFile(Path(path), right, damaged, tuple(unreadable))
    finally:
        os.close(file)


def _verified(
    read: Read, header: KeptHeader, progress: Callable[[int, int], None]
) -> tuple[int, dict[int, str], list[int]]:
    layout, right = header.layout, 0
    damaged: dict[int, str] = {}
    unreadable: list[int] = []
    for slot, entry in _entries(read, header):
        progress(slot, layout.slots)
        if entry is None:
            unreadable.append(slot)
        elif is_right(read(layout.block_bytes, layout.block_at(slot)), entry.digest):
            right += 1
        elif _entry_now(read, header, slot) == entry:
            damaged[slot] = entry.key.hex()
    return right, damaged, unreadable


def drop_kept(path: str | os.PathLike[str], *, force: bool = False) -> int:
    """Removes a store, sound or not; returns the bytes that this frees.

    They are 0 where another name (a hard link) still holds the file.

    Processes that read a file keep what they have mapped until they end. On a device the store's
    mark is taken away: who reads it finds nothing from then on, and the bytes of its blocks stay
    until they are written over.

    Parameters
    ----------
    force
        What is on a device may go though it is no store.

    Raises
    ------
    BlockingIOError
        A process writes it.
    FileExistsError
        The device holds something that is no store.
    OSError
        There is none, or it is not this user's.
    """
    if is_device(path):
        return DevicePlace(find_device(path)).free(force=force)
    state = os.lstat(path)
    if state.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {state.st_uid}", str(path))
    if stat.S_ISREG(state.st_mode):
        try:
            file = open_private(path, os.O_RDONLY)
        except PermissionError:  # ours, but others may open it: no store of ours in use
            file = -1
        if file >= 0:
            try:
                if is_locked(file):
                    raise BlockingIOError(
                        errno.EAGAIN, "a process writes it; stop that one first", str(path)
                    )
            finally:
                os.close(file)
    os.unlink(path)
    return 512 * state.st_blocks if state.st_nlink == 1 else 0
