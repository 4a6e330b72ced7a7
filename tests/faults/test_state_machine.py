"""Random operations on a session, compared with a model; the soak runs the same for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from .random_session import RandomSession

TestRandomSession = RandomSession.TestCase
TestRandomSession.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
