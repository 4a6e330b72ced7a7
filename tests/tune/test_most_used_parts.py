"""Parts that are asked for come near by their pages; contents stay, and no node is overfilled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cxl_offload import zeros
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import MostUsedParts, MostUsedRule, Slice, decisions
from cxl_offload.units import MIB

NEAR, FAR = 0, 2
PARTS, PART_BYTES = 8, MIB
OURS = ("script", "hot")


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


@pytest.fixture
def stack(session: Session) -> torch.Tensor:
    """A weight whose slices are the parts, each with its own number in it."""
    made = zeros((PARTS, PART_BYTES), dtype=torch.uint8, policy=f"bind:{FAR}", session=session)
    for number in range(PARTS):
        made[number] = number + 1
    return made


def slices(stack: torch.Tensor) -> dict[str, list[Slice]]:
    return {str(at): [Slice(stack[at].data_ptr(), stack[at].nbytes)] for at in range(len(stack))}


def most_used_parts(session: Session, stack: torch.Tensor, **options: object) -> MostUsedParts:
    given = {"room_bytes": 3 * PART_BYTES, "budget_bytes_per_round": 4 * PART_BYTES, **options}
    return MostUsedParts(slices(stack), near=[NEAR], far=[FAR], session=session, **given)  # type: ignore[arg-type]


def asked(*parts: int) -> np.ndarray:
    return np.bincount(parts, minlength=PARTS).astype(float)


def test_parts_that_are_asked_for_come_near_and_keep_their_contents(
    session: Session, stack: torch.Tensor
) -> None:
    parts = most_used_parts(session, stack)
    for _ in range(400):
        parts.round(asked(2, 5, 7))
    assert parts.granted() == parts.most_used.near == (2, 5, 7)
    assert all(bool((stack[at] == at + 1).all()) for at in range(PARTS))
    for _ in range(2000):
        parts.round(asked(0, 5, 7))
    assert parts.granted() == (0, 5, 7)
    assert all(bool((stack[at] == at + 1).all()) for at in range(PARTS))
    use = session.stats().nodes
    assert use[NEAR].current_bytes == 3 * PART_BYTES, "there is no second copy"
    with pytest.warns(DeprecationWarning, match="hot is now most_used"):
        assert parts.hot is parts.most_used
    assert use[FAR].current_bytes == 5 * PART_BYTES


def test_moves_stay_below_the_budget_and_a_hundredth_of_what_is_read(
    session: Session, stack: torch.Tensor
) -> None:
    draw = np.random.default_rng(1)
    parts = most_used_parts(session, stack, budget_bytes_per_round=PART_BYTES // 8)
    for round_ in range(1, 600):
        parts.round(asked(*draw.integers(0, PARTS, 4)))
        assert parts.moved_bytes <= round_ * PART_BYTES // 8
        assert parts.moved_bytes <= 0.01 * parts.asked_bytes
    assert parts.moved_bytes > 0


def test_nothing_moves_without_a_budget(
    session: Session, stack: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    before = {one.outcome: one.count for one in decisions() if (one.framework, one.tuner) == OURS}
    parts = most_used_parts(session, stack, budget_bytes_per_round=0)
    with caplog.at_level("INFO", "cxl_offload.tune"):
        for _ in range(300):
            parts.round(asked(4))
    assert parts.granted() == ()
    assert parts.moved_bytes == 0
    assert caplog.text.count("advice only: 4 is asked for more often") == 1
    after = {one.outcome: one.count for one in decisions() if (one.framework, one.tuner) == OURS}
    assert after["advised"] == before.get("advised", 0) + 1
    assert after.get("moved", 0) == before.get("moved", 0)


def test_full_near_node_leaves_every_part_whole_and_the_books_right(
    session: Session, stack: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    parts = most_used_parts(session, stack, rule=MostUsedRule(traffic=1.0))
    reserve = 1 << 30  # of a node of this size, see docs/reliability.md
    room = reserve + PART_BYTES + PART_BYTES // 2
    session.kernel.set_used_by_others(NEAR, session.free_bytes(NEAR) - room)
    for _ in range(30):
        parts.round(asked(1, 2, 6))
    assert "stay where they are" in caplog.text
    assert len(parts.granted()) == 1
    assert parts.granted() == parts.most_used.near
    for at in range(PARTS):
        pages = session.bytes_per_node(stack[at].data_ptr(), PART_BYTES)
        assert len(pages) == 1, "a part lies on two tiers"
    session.kernel.set_used_by_others(NEAR, 0)
    for _ in range(400):
        parts.round(asked(1, 2, 6))
    assert parts.granted() == (1, 2, 6)


def test_parts_that_were_near_beyond_the_room_go_far(session: Session) -> None:
    stack = zeros((PARTS, PART_BYTES), dtype=torch.uint8, policy=f"bind:{NEAR}", session=session)
    parts = most_used_parts(session, stack, rule=MostUsedRule(traffic=1.0))
    for _ in range(20):
        parts.round(asked(0, 1, 2))
    assert parts.granted() == (0, 1, 2)


def test_parts_that_are_none_of_the_sessions_are_refused(session: Session) -> None:
    own = torch.zeros(4, MIB, dtype=torch.uint8)
    with pytest.raises(ValueError, match="'0' is not in memory of this session"):
        most_used_parts(session, own)
    small = zeros((4, 64), dtype=torch.uint8, policy=f"bind:{FAR}", session=session)
    with pytest.raises(ValueError, match="no whole page"):
        most_used_parts(session, small)
    with pytest.raises(ValueError, match="all of one size"):
        MostUsedParts({}, near=[NEAR], far=[FAR], room_bytes=1, session=session)
