"""Ctrl-C that waits: what gives something back is not cut short halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Handlers of signals that end a program are called when the block has ended.

    Of handlers that Python calls, in the main thread; a signal that has none ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    before = {each: signal.getsignal(each) for each in _ENDING}
    handlers = {each: handler for each, handler in before.items() if callable(handler)}

    def later(number: int, frame: Any) -> None:
        came.append((handlers[signal.Signals(number)], (number, frame)))

    try:
        for number in handlers:
            signal.signal(number, later)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for handler, given in came[:1]:
            handler(*given)
