"""None of many random decisions overfills a node or moves what is being copied."""

from __future__ import annotations

import pytest

from tests.tune.random_decisions import run


@pytest.mark.parametrize("seed", range(4))
def test_no_random_decision_overfills_a_node_or_moves_what_is_copied(seed: int) -> None:
    counts = run(seed, 250)
    assert counts["decisions"] == 250
    assert counts["refused"] > 0, "no node was ever full, so nothing was tested"
    assert counts["copies queued"] > 0
    assert counts["faults"] > 0
    assert counts["bytes moved"] > 0
