"""Moves of memory as events of the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from cxl_offload import _C
from cxl_offload.events import EVENTS, tell
from cxl_offload.memory.policy import PolicyLike


@contextlib.contextmanager
def moving(allocation: _C.Allocation, nbytes: int, policy: PolicyLike) -> Iterator[None]:
    """Logs what is moved inside, from where to where, how long it took, and a refusal."""
    if not EVENTS.isEnabledFor(logging.DEBUG):
        yield
        return
    source, began = allocation.requested, time.perf_counter()
    refused = None
    try:
        yield
    except Exception as error:
        refused = str(error)
        raise
    finally:
        seconds = time.perf_counter() - began
        said = {"source": source, "target": str(policy), "refused": refused}
        tell("move", nbytes=nbytes, seconds=seconds, **said)
