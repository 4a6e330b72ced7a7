"""Which session allocates when none is named: the one chosen by ``use``, or the real machine's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from cxl_offload.memory.session import Memory

__all__ = ["active", "chosen", "use"]

_lock = threading.Lock()
_default: Memory | None = None
_stack: list[Memory] = []


def chosen() -> Memory | None:
    """The session of the innermost :func:`use`; None where everything is left to the default."""
    with _lock:
        return _stack[-1] if _stack else None


def active() -> Memory:
    """The session in use: the innermost :func:`use`, or that of the real machine.

    It is one for the whole process, so that threads which copy or prefetch see the same nodes as
    the thread that set it up. A forked child starts with a session of its own.
    """
    global _default
    with _lock:
        if _stack:
            return _stack[-1]
        if _default is None:
            _default = Memory.linux()
        return _default


@contextlib.contextmanager
def use(memory: Memory) -> Iterator[Memory]:
    """Makes ``memory`` the session in use inside the ``with`` block.

    Tensors made in the block stay valid after it.
    """
    with _lock:
        _stack.append(memory)
    try:
        yield memory
    finally:
        with _lock:
            _stack.remove(memory)


def _forget_in_child() -> None:
    global _lock, _default, _stack
    _lock = threading.Lock()
    _default = None
    _stack = []


os.register_at_fork(after_in_child=_forget_in_child)
