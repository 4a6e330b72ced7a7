"""One thread that works beside the caller's. A forked child starts its own instead of waiting."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakSet

Returned = TypeVar("Returned")

_all: WeakSet[OneThread] = WeakSet()


class OneThread:
    """Runs what it is given, one after another, on a thread that begins with the first of it.

    A forked child does not have its parent's thread: what that had not done yet is an error in the
    child, and what the child gives runs on a thread of the child's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._given: WeakSet[Future[Any]] = WeakSet()

    def submit(self, work: Callable[..., Returned], *arguments: Any) -> Future[Returned]:
        """Gives it something to do."""
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            future = self._thread.submit(work, *arguments)
            self._given.add(future)
            return future

    def forget_in_child(self) -> None:
        """Forgets the thread in a forked child, which does not have it."""
        given = list(self._given)
        self._begin()
        for future in given:
            with contextlib.suppress(InvalidStateError):  # done already
                future.set_exception(
                    RuntimeError(
                        f"{self._name}: begun by the process that forked this one, whose thread is "
                        "not here; let it finish before forking"
                    )
                )


def _forget_in_child() -> None:
    for each in list(_all):
        each.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
