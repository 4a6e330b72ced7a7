"""A memory cgroup of a test's own, in which the kernel kills who needs more than its limit.

Only processes that joined it are killed by that limit: the group lies below the test's own, or in
cgroup v2, where a group with processes has no others below it, beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_NUMBER = itertools.count()


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The group of a folder, of cgroup v1 or v2."""

    folder: Path

    @property
    def _is_v2(self) -> bool:
        return (self.folder / "memory.max").exists()

    def joined_by(self, command: Sequence[str]) -> list[str]:
        """A command that joins the group, and only then becomes the one that is given."""
        procs = shlex.quote(str(self.folder / "cgroup.procs"))
        return ["/bin/sh", "-c", f'echo $$ >{procs} && exec "$@"', "sh", *command]

    def leave_bytes(self, nbytes: int) -> None:
        """Lets the group have so much more than what it holds, without swap.

        The page cache does not count as held: the kernel takes it back before it kills.
        """
        held = self._numbers("memory.stat")
        cached = held["active_file"] + held["inactive_file"]
        if self._is_v2:
            most = int((self.folder / "memory.current").read_text()) - cached + nbytes
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                (self.folder / "memory.swap.max").write_text("0")
            (self.folder / "memory.max").write_text(str(most))
        else:
            most = int((self.folder / "memory.usage_in_bytes").read_text()) - cached + nbytes
            (self.folder / "memory.swappiness").write_text("0")
            (self.folder / "memory.limit_in_bytes").write_text(str(most))

    @property
    def kills(self) -> int:
        """Processes of the group that the kernel killed for want of memory."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        return self._numbers(name)["oom_kill"]

    def _numbers(self, name: str) -> dict[str, int]:
        lines = (self.folder / name).read_text().splitlines()
        return {key: int(value) for key, value in map(str.split, lines)}

    def remove(self) -> None:
        """Kills who is left of those that joined, and removes the group."""
        for _ in range(100):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.folder.rmdir()
            except OSError:  # who was killed is not gone yet
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(f"{self.folder} has processes that do not end")


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group without a limit, for the time of a test; skips the test where none can be made."""
    group = _made()
    try:
        yield group
    finally:
        group.remove()


def _made() -> MemoryGroup:
    refused = "no memory cgroup: neither cgroup v1 nor v2 has its controller here"
    for parent in _parents():
        folder = parent / f"cxl-offload-test-{os.getpid()}-{next(_NUMBER)}"
        try:
            folder.mkdir()
        except OSError as error:
            refused = f"no memory cgroup can be made below {parent}: {error.strerror}"
            continue
        group = MemoryGroup(folder)
        try:
            assert group.kills == 0
            done = os.access(folder / "cgroup.procs", os.W_OK)
        except (OSError, KeyError):
            done = False
        if done:
            return group
        folder.rmdir()
        refused = f"groups below {parent} have no memory controller"
    pytest.skip(refused)


def _parents() -> Iterator[Path]:
    """Folders in which a group may be made, the closest to this process first."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _V1 / path.lstrip("/")
        elif not controllers and (_V2 / "cgroup.controllers").exists():
            own = _V2 / path.lstrip("/")
            if own == _V2:
                with contextlib.suppress(OSError):
                    (own / "cgroup.subtree_control").write_text("+memory")
                yield own
            else:
                yield own.parent
