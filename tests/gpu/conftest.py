"""What runs on a real GPU only. Nothing here opens CUDA while tests are collected elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why no test of this folder can run here; None where a GPU is at hand."""
    if torch.cuda.is_available():
        return None
    build = "is built without CUDA" if torch.version.cuda is None else "finds no usable GPU"
    return f"needs a CUDA GPU: torch {torch.__version__} {build}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    reason = why_not() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of this machine with CUDA in use; what is left at the end is a leak."""
    torch.zeros(1, device="cuda")
    session = Session.linux()
    with cxl_offload.use(session):
        yield session
    gc.collect()
    torch.cuda.synchronize()
    assert session.stats().asked_bytes.current == 0
    session.trim()
    assert session.stats().mapped_bytes.current == 0
