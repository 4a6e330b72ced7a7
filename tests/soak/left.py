"""What a round may leave behind: nothing that it made, and no more memory from round to round."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cxl_offload.memory.shared import SHARED_ROOT

MIB = 1 << 20
ENOUGH_ROUNDS = 12
"""Fewer of a kind say nothing about growth."""

MOST_GROWTH = {
    "heap_bytes": 2 * MIB,
    "python_blocks": 20_000,
    "mappings": 40,
    "files": 8,
    "tasks": 8,
}
"""Over all turns after the first ones. A block of Python is some 100 bytes."""

PROCESS = "the process"
"""All kinds of rounds together. What rounds of one kind keep in caches, those of another clear: by
kind both look as if they went on for ever."""

JUDGED = (PROCESS, "vllm")
"""Kinds that may not add too much: an engine is a process of its own."""

NOT_JUDGED = {("vllm", "heap_bytes")}
"""The heap of an engine grows with the requests that it sees, slower and slower, without tiers as
much as with them (``python -m tests.soak.engine_heap``). The figure is in the result."""


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def _heap_bytes() -> int:
    """Bytes that malloc has given out, all arenas and large blocks; 0 where glibc is too old."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return 0
    libc.mallinfo2.restype = _Mallinfo2
    libc.malloc_trim(0)
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of the machine.

    Attributes
    ----------
    heap_bytes
        Given out by malloc, which fragments and caches do not change as they change what is
        resident.
    python_blocks
        Small objects, which Python keeps outside of malloc.
    mappings, files, tasks
        Ranges of addresses, open files, and threads, those of OpenMP too.
    resident_bytes
        Pages in memory.
    """

    heap_bytes: int
    python_blocks: int
    mappings: int
    files: int
    tasks: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        for _ in range(2):
            gc.collect()
        heap = _heap_bytes()
        with open("/proc/self/maps") as lines:
            mappings = sum(1 for _ in lines)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            heap_bytes=heap,
            python_blocks=sys.getallocatedblocks(),
            mappings=mappings,
            files=len(os.listdir("/proc/self/fd")),
            tasks=len(os.listdir("/proc/self/task")),
            resident_bytes=pages * resource.getpagesize(),
        )


class Growth:
    """What rounds of every kind added, one after the other, and turns of all kinds."""

    def __init__(self) -> None:
        self._added: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def add(self, kind: str, before: Held, after: Held) -> None:
        old, new = asdict(before), asdict(after)
        for name in MOST_GROWTH:
            self._added[kind][name].append(new[name] - old[name])

    def trends(self, kind: str) -> dict[str, int]:
        """What its rounds after the first quarter added, by measure; empty: too few to tell."""
        return {
            name: trend(added[len(added) // 4 :])
            for name, added in self._added[kind].items()
            if len(added) >= ENOUGH_ROUNDS
        }

    def too_much(self) -> list[str]:
        """A line for each measure of which the process, or an engine, adds more than it may."""
        return [
            f"rounds of {kind} add {found:,} {name} in all, and may {MOST_GROWTH[name]:,}: "
            f"{self._added[kind][name]}"
            for kind in JUDGED
            for name, found in self.trends(kind).items()
            if found > MOST_GROWTH[name] and (kind, name) not in NOT_JUDGED
        ]


def trend(added: Sequence[int]) -> int:
    """How much rounds add in all: the median slope between any two of them, times their number.

    What a single round adds for good, a cache that it is the first to need, is no trend.
    """
    sums = [sum(added[: at + 1]) for at in range(len(added))]
    slopes = [
        (sums[two] - sums[one]) / (two - one)
        for one in range(len(sums))
        for two in range(one + 1, len(sums))
    ]
    return round(statistics.median(slopes) * len(added)) if slopes else 0


def children() -> dict[int, str]:
    """Processes that this one started and that live, or were not waited for."""
    found = {}
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)  # a thread or a child
    for task in Path("/proc/self/task").iterdir():
        of_task: list[str] = []
        with gone:
            of_task = (task / "children").read_text().split()
        for child in of_task:
            with gone:
                found[int(child)] = Path(f"/proc/{child}/comm").read_text().strip()
    return found


@dataclass(frozen=True, slots=True)
class Around:
    """Threads, children and shared files before a round."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Around:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(children()),
            frozenset(os.listdir(SHARED_ROOT)),
        )

    def check(self) -> None:
        """Nothing of a round is left, unless it was there before."""
        threads = [each.name for each in threading.enumerate() if each not in self.threads]
        assert not threads, f"threads are left: {threads}"
        left = {pid: name for pid, name in children().items() if pid not in self.children}
        assert not left, f"children are left: {left}"
        files = [
            name for name in os.listdir(SHARED_ROOT) if name not in self.shared and _ours(name)
        ]
        assert not files, f"files are left in {SHARED_ROOT}: {files}"


def _ours(name: str) -> bool:
    """Whether this process or a child of it made a shared file: others use the folder as well."""
    parts = name.replace("-", "_").replace(".", "_").split("_")
    if str(os.getpid()) in parts:
        return True
    # What a worker of a DataLoader shares is torch_PID_...; it is ended by now.
    return parts[0] == "torch" and not Path("/proc", parts[1]).exists()
