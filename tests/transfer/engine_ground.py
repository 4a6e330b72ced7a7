"""An engine and memory at both of its ends, for its tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cxl_offload.memory import Session
from cxl_offload.transfer import CopyEngine

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 64 * KIB


def engine_of(session: Session, **options: Any) -> CopyEngine:
    options.setdefault("chunk_bytes", CHUNK)
    options.setdefault("staging_bytes", 8 * CHUNK)
    return CopyEngine(session, **options)


def host(session: Session, nbytes: int, where: str = "bind:0", *, pin: bool = True) -> Any:
    """An allocation and its bytes, random."""
    allocation = session.allocate(nbytes, where, pin=pin)
    view = np.from_dlpack(allocation)
    view[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return allocation, view


def on_gpu(nbytes: int) -> Any:
    return np.full(nbytes, 0xEE, np.uint8)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("did not happen within two seconds")
