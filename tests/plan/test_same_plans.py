"""Plans are what they were: a part of the requests, all of them by ``tests.plan.same_plans``."""

from __future__ import annotations

import pytest

from tests.plan.same_plans import COUNT, differences, read

PARTS = 8
TESTED = 2
"""Parts that the test asks; the other requests are left to the command."""


def test_fixture_has_every_request() -> None:
    entries = read()
    assert len({tuple(entry["arguments"]) for entry in entries}) > 0.9 * COUNT
    assert sum("error" not in entry["answer"] for entry in entries) > COUNT // 2


@pytest.mark.parametrize("part", range(TESTED))
def test_plan_is_unchanged_for_random_requests(part: int) -> None:
    assert differences(read()[part::PARTS]) == []
