"""A session for every test; what a test leaves behind in it is a failure of that test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.placement.rig import Rig, open_rig, rig_names


@pytest.fixture(params=rig_names())
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    found = open_rig(request.param)
    yield found
    found.session.trim()
    stats = found.session.stats()
    assert stats.mapped_bytes.current == 0, "memory is still mapped"
    assert not any(use.current_bytes for use in stats.nodes.values()), "a node is still charged"


@pytest.fixture
def our_rig(rig: Rig) -> Rig:
    """A machine whose memory may be filled and whose pools may be changed: not the host."""
    return rig


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Not skipped but not there: on the host these tests mean nothing.
    kept, left_out = [], []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        name = getattr(getattr(item, "callspec", None), "params", {}).get("rig")
        (left_out if "our_rig" in fixtures and name == "host" else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
