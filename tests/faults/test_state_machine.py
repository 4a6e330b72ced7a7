"""Random operations on a session, compared with a model; the soak runs the same for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from cxl_offload.memory import Bind

from .ground import MIB
from .random_session import RandomSession

TestRandomSession = RandomSession.TestCase
TestRandomSession.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_huge_pages_that_fit_in_the_sum_of_two_nodes_and_in_neither_are_refused() -> None:
    """Found by the soak: seed 20261125. Nodes with 3 and 9 MiB of room hold 2 and 8 MiB of them."""
    state = RandomSession()
    state.take(node=1, nbytes=39 * MIB)
    state.take(node=0, nbytes=45 * MIB)
    state.allocate(nbytes=11 * MIB, pages="thp", policy=Bind((0, 1)))
    assert not state.live
    state.allocate(nbytes=10 * MIB, pages="thp", policy=Bind((0, 1)))
    assert state.live
    state.teardown()
