"""What goes on beside a round: a thread that moves, and others that fill and empty nodes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cxl_offload import _C
from cxl_offload.errors import PlacementError
from tests.faults.ground import MIB, NODES

REFUSED = (MemoryError, OSError, PlacementError)
"""What full nodes, faults and pages that a child shares are allowed to cause."""


@contextmanager
def beside(step: Callable[[], None], every_s: float = 0.01) -> Iterator[None]:
    """Makes steps in a thread of its own until the block ends; raises what a step raised."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.wait(every_s):
                step()
        except BaseException as error:  # reported by the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, name="beside")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def others(
    kernel: _C.SimulatedKernel, seed: int, node_bytes: int, left_bytes: int = 64 * MIB
) -> Callable[[], None]:
    """A step after which others hold more or less of one of the simulated nodes."""
    rng = random.Random(seed)

    def step() -> None:
        try:
            kernel.set_used_by_others(rng.choice(NODES), rng.randrange(0, node_bytes - left_bytes))
        except ValueError:  # more than is free
            return

    return step


def again(operation: Callable[[], object], counts: Counter[str], wait_s: float = 30.0) -> object:
    """What an operation gives, once neither faults nor full nodes refuse it."""
    stop = threading.Event()
    for _ in range(int(wait_s / 0.005)):
        try:
            return operation()
        except REFUSED as error:
            counts[type(error).__name__] += 1
            stop.wait(0.005)
    raise AssertionError(f"refused for {wait_s:g} s: {operation}")


_FILLS = """
import mmap, os, random, sys, time, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
rng, most, folder = random.Random(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
file = os.open(folder, os.O_TMPFILE | os.O_RDWR)
while True:
    os.ftruncate(file, 0)
    for _ in range(rng.randrange(most // 2 >> 20)):
        os.write(file, b"x" * (1 << 20))
    with mmap.mmap(-1, rng.randrange(1, most // 2 >> 20) << 20) as own:
        for at in range(0, len(own), 4096):
            own[at] = 1
        time.sleep(rng.uniform(0.05, 0.5))
"""


@contextmanager
def pressure(seed: int, most_bytes: int = 256 * MIB, folder: str = "/dev/shm") -> Iterator[None]:
    """Another process that fills and empties memory of this machine and its tmpfs.

    Its file has no name, and it ends when this process does, however that ends.
    """
    command = [sys.executable, "-I", "-c", _FILLS, str(seed), str(most_bytes), folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            yield
            if child.poll() is not None:
                raise AssertionError(f"the process that fills memory ended with {child.returncode}")
        finally:
            child.kill()
