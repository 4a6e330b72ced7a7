"""Steps are followed one at a time, and only in the process that made who follows them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from cxl_offload.core import ForkGuard


class Gate:
    """Lets one thread at a time through, of the process that made it."""

    __slots__ = ("_guard", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a callback of a decision may end another step
        self._guard = ForkGuard()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, in which the lock may be held for ever."""
        return self._guard.in_child


class _Gated(Protocol):
    _gate: Gate


_Self = TypeVar("_Self", bound=_Gated)
_Arguments = ParamSpec("_Arguments")


def one_at_a_time(
    method: Callable[Concatenate[_Self, _Arguments], None],
) -> Callable[Concatenate[_Self, _Arguments], None]:
    """A method that one thread runs at a time, and that does nothing in a forked child.

    A child cannot move its copies of the pages, and its steps say nothing of the parent's.
    """

    @functools.wraps(method)
    def call(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if self._gate.in_child:
            return
        with self._gate.lock:
            method(self, *args, **kwargs)

    return call
