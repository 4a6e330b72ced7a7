"""Sessions that the memory tests run on: this machine's kernel, and simulated machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxl_offload.memory import Session

from .machines import GIB, simulated_memory


@pytest.fixture(params=["linux", "simulated"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The same contract on both kernels; what is left over at the end is a leak."""
    session = Session.linux() if request.param == "linux" else simulated_memory()
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0


@pytest.fixture
def three_nodes() -> Iterator[Session]:
    """Two sockets of 8 GiB and a CXL node of 4 GiB, simulated."""
    session = simulated_memory((8 * GIB, 8 * GIB, 4 * GIB))
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0
