"""Which session allocates when none is named: the one chosen by ``use``, or the real machine's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from cxl_offload.memory.session import Session
from cxl_offload.renamed import old_names, renamed_keywords

_lock = threading.Lock()
_default: Session | None = None
_stack: list[Session] = []


def chosen_session() -> Session | None:
    """The session of the innermost :func:`use`; None where everything is left to the default."""
    with _lock:
        return _stack[-1] if _stack else None


def current_session() -> Session:
    """The innermost :func:`use`, or the session of the real machine.

    It is one for the whole process, so that threads which copy or prefetch see the same nodes as
    the thread that set it up. A forked child starts with a session of its own.
    """
    global _default
    with _lock:
        if _stack:
            return _stack[-1]
        if _default is None:
            _default = Session.linux()
        return _default


@renamed_keywords(memory="session")
@contextlib.contextmanager
def use(session: Session) -> Iterator[Session]:
    """Makes ``session`` the one in use inside the ``with`` block.

    Tensors made in the block stay valid after it.
    """
    if not isinstance(session, Session):
        raise TypeError(
            f"use {type(session).__name__}: give a session, such as Session.simulated(machine)"
        )
    with _lock:
        _stack.append(session)
    try:
        yield session
    finally:
        with _lock:
            if session in _stack:  # not where a process was forked in the block, and ends it
                _stack.remove(session)


def _forget_in_child() -> None:
    global _lock, _default, _stack
    _lock = threading.Lock()
    _default = None
    _stack = []


os.register_at_fork(after_in_child=_forget_in_child)

__getattr__ = old_names(__name__)
