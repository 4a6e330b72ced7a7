"""Runs a function in a forked child: limits, users and filters that cannot be taken back."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator

from tests.placement.kernel_calls import (
    MPOL_DEFAULT,
    MPOL_PREFERRED,
    anonymous,
    meminfo_bytes,
    page_nodes,
    populate,
    set_thread_policy,
)

MIB = 1 << 20


def run_in_child(work: Callable[[], None]) -> None:
    """Fails the test with the child's traceback, or with the signal that killed it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                work()
                status = 0
            except BaseException:
                os.write(writer, traceback.format_exc().encode())
        os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}\n{said}"


@contextlib.contextmanager
def stranger_filling(node: int, *, leave_bytes: int) -> Iterator[int]:
    """Another process holds the memory of ``node`` but for ``leave_bytes``; yields its pid.

    It stops by itself at the last page: it only prefers the node, and ends when a page of its
    comes from elsewhere. Nobody is killed for it.
    """
    with _stranger(node, leave_bytes) as (pid, go, done):
        os.write(go, b"g")
        assert os.read(done, 1) == b"d", "the process that fills the node died"
        yield pid


@contextlib.contextmanager
def stranger_filling_meanwhile(node: int) -> Iterator[Callable[[], None]]:
    """Another process, which takes all of ``node`` once the yielded function is called."""
    with _stranger(node, 0) as (_, go, _done):
        yield lambda: os.write(go, b"g") and None


@contextlib.contextmanager
def _stranger(node: int, leave_bytes: int) -> Iterator[tuple[int, int, int]]:
    go_reader, go_writer = os.pipe()
    done_reader, done_writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(done_reader)
            os.close(go_writer)
            os.read(go_reader, 1)
            _fill(node, leave_bytes)
            os.write(done_writer, b"d")
            signal.pause()
        os._exit(1)
    os.close(go_reader)
    os.close(done_writer)
    try:
        yield child, go_writer, done_reader
        alive, _ = os.waitpid(child, os.WNOHANG)
        assert alive == 0, "the process that fills the node was killed"
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(go_writer)
        os.close(done_reader)


def _fill(node: int, leave_bytes: int) -> None:
    set_thread_policy(MPOL_PREFERRED, [node])
    size = meminfo_bytes(node, "MemTotal")
    mapping, address = anonymous(size)
    taken = 0
    chunk = 4 * MIB
    while taken < size:
        if leave_bytes:
            chunk = min(chunk, meminfo_bytes(node, "MemFree") - leave_bytes) // 4096 * 4096
        if chunk <= 0:
            break
        step = min(chunk, size - taken)
        populate(address + taken, step)
        taken += step
        if page_nodes(address + taken - 4096, 4096) != [node]:
            break
    set_thread_policy(MPOL_DEFAULT)
    _kept.append(mapping)


_kept: list[object] = []
