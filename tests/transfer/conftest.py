"""A GPU that is not there: its memory is numpy's, its streams run when a test says so."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cxl_offload import _C
from cxl_offload.memory import Session

from ..memory.machines import simulated_machine


@pytest.fixture
def driver() -> _C.FakeDriver:
    return _C.FakeDriver()


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    """Two sockets and a CXL node, simulated; what is left over at the end is a leak."""
    session = Session.simulated(simulated_machine(), driver=driver)
    yield session
    driver.hold_waiters(False)
    if session.stats().asked_bytes.current != 0:
        gc.collect()  # what a failed test's traceback holds is no leak; it takes long, so only then
    assert session.stats().asked_bytes.current == 0
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert driver.registered_bytes == 0
    assert driver.events == 0
