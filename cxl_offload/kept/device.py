"""Device-DAX devices as places of stores: ``/dev/dax0.0``, which can be mapped and nothing else.

A device has no size of a file, no name to remove and no ``read``: what lies there is known from its
first eight bytes. A store has its mark there, and leaves another one when it is dropped. Whatever
else is there is somebody else's and stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.kept.private_file import check_private
from cxl_offload.topology.cxl import read_dax
from cxl_offload.topology.tree import Tree

ROOT = Path("/")
"""Below it are ``dev`` and ``sys``."""

_PATH = re.compile(r"/dev/(dax\d+\.\d+)")
_USUAL_ALIGN_BYTES = 2 << 20


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the name of a Device-DAX device, there or not."""
    return _PATH.fullmatch(os.fspath(path)) is not None


@dataclass(frozen=True, slots=True)
class KeptDevice:
    """A device in mode devdax.

    Attributes
    ----------
    nbytes
        That can be mapped: whole pages of the device.
    align_bytes
        Of a page: mappings begin and end at multiples of it.
    """

    path: Path
    nbytes: int
    align_bytes: int

    def rounded(self, nbytes: int) -> int:
        """Of a mapping that holds so many bytes."""
        return -(-nbytes // self.align_bytes) * self.align_bytes

    def open(self, flags: int) -> int:
        """Opens it; no session places tensors there as long as the file is open.

        Raises
        ------
        OSError
            It is missing, no such device, of another user, open to others, or a session has it.
        """
        node = ROOT / self.path.relative_to("/")
        careful = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            state = os.lstat(node)
            if not is_node_of(state, self.path.name):
                raise OSError(errno.ENODEV, "it is not the device of this name", str(self.path))
            check_private(state, self.path)  # before it is opened: only its user may
            file = os.open(node, flags & ~os.O_CREAT | careful)
        except FileNotFoundError:
            raise OSError(
                errno.ENODEV, "it has no file here; in a container add --device", str(self.path)
            ) from None
        try:
            check_private(os.fstat(file), self.path)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise OSError(
                errno.EBUSY,
                "a session or another program holds it; a device is a pool or a store",
                str(self.path),
            ) from None
        except BaseException:
            os.close(file)
            raise
        return file


def is_node_of(state: os.stat_result, name: str) -> bool:
    """Whether a file is the character device that the kernel gave a Device-DAX device."""
    numbers = Tree(ROOT).text(f"/sys/bus/dax/devices/{name}/dev")
    own = f"{os.major(state.st_rdev)}:{os.minor(state.st_rdev)}"
    return stat.S_ISCHR(state.st_mode) and numbers == own


def find_device(path: str | os.PathLike[str]) -> KeptDevice:
    """The device of a name.

    Raises
    ------
    OSError
        There is none, or it is not in mode devdax; says how to have it so.
    """
    there = {each.name: each for each in read_dax(Tree(ROOT))}
    name = Path(path).name
    device = there.get(name)
    if device is None:
        known = ", ".join(there) or "none"
        why = f"this machine has no such Device-DAX device; there are: {known}"
        raise OSError(errno.ENODEV, why, str(path))
    if device.mode != "devdax":
        why = "it is not in mode devdax"
        if device.mode == "system-ram":
            why = f"it is in mode system-ram, so its memory is node {device.target_node}"
        command = f"sudo daxctl reconfigure-device --force --mode=devdax {name}"
        raise OSError(errno.ENODEV, f"{why}; take it off: {command}", str(path))
    align = device.align_bytes or _USUAL_ALIGN_BYTES
    return KeptDevice(Path(path), device.size_bytes // align * align, align)


def kept_devices() -> list[Path]:
    """The devices in mode devdax, by name; nothing is opened."""
    devices = read_dax(Tree(ROOT))
    return [Path("/dev") / each.name for each in devices if each.mode == "devdax"]
