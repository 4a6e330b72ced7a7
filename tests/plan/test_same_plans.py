"""Plans are what they were, for all requests of ``tests.plan.same_plans``."""

from __future__ import annotations

import pytest

from tests.plan.same_plans import COUNT, differences, read

PARTS = 8
TESTED = 1
"""Parts that are asked in every run of the tests."""


def test_fixture_has_every_request() -> None:
    entries = read()
    assert len({tuple(entry["arguments"]) for entry in entries}) > 0.9 * COUNT
    assert sum("error" not in entry["answer"] for entry in entries) > COUNT // 2


@pytest.mark.slow(reason="plans hundreds of requests")
@pytest.mark.parametrize("part", range(TESTED))
def test_plan_is_unchanged_for_random_requests(part: int) -> None:
    assert differences(read()[part::PARTS]) == []


@pytest.mark.slow(reason="plans the other 175 requests")
@pytest.mark.parametrize("part", range(TESTED, PARTS))
def test_plan_is_unchanged_for_the_other_requests(part: int) -> None:
    assert differences(read()[part::PARTS]) == []
