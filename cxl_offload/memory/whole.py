"""Copies over memory that may fail: is all of it still there, before and after?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from cxl_offload import _C

Ranges = list[tuple[int, int]]
"""(address, bytes) of each part."""


def refuse_lost(ranges: Callable[[], Ranges]) -> None:
    """Asks for the parts only where anything of this process is lost.

    Raises
    ------
    MemoryLostError
        Something of them is lost, and was not written anew.
    """
    if _C.any_loss():
        _C.refuse_lost(ranges())


@contextlib.contextmanager
def copying(*, source: Callable[[], Ranges], target: Callable[[], Ranges]) -> Iterator[None]:
    """Around a copy that writes all of its target.

    Raises
    ------
    MemoryLostError
        Something of the source is lost, or memory of either failed meanwhile.
    """
    refuse_lost(source)
    if _C.any_loss():
        for address, nbytes in target():
            _C.settle(address, nbytes)
    before = _C.loss_count()
    yield
    if _C.loss_count() != before:
        refuse_lost(lambda: source() + target())
