"""Rows that are looked up often come near; what is looked up stays the same."""

from __future__ import annotations

import pytest
import torch

from cxl_offload import from_tensor
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import MostUsedRows

NEAR, FAR = 0, 2
ROWS, WIDTH = 4096 + 100, 64  # rows of 256 bytes, sixteen a page
BLOCK = 64 << 10


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


def embedding(session: Session) -> torch.nn.Embedding:
    torch.manual_seed(1)
    made = torch.nn.Embedding(ROWS, WIDTH)
    made.weight.data = from_tensor(made.weight.data, policy=f"bind:{FAR}", session=session)
    return made


def test_blocks_of_rows_that_are_looked_up_come_near(session: Session) -> None:
    table = embedding(session)
    plain = table.weight.detach().clone()
    ours = MostUsedRows(
        table, near=[NEAR], far=[FAR], room_bytes=4 * BLOCK, session=session,
        budget_bytes_per_step=1 << 20,
    )  # fmt: skip
    assert ours.rows == 256
    wanted = (3, 7, 11)
    draw = torch.Generator().manual_seed(2)
    with ours.following():
        for _ in range(60):
            block = torch.tensor(wanted)[torch.randint(0, 3, (2048,), generator=draw)]
            rows = block * ours.rows + torch.randint(0, ours.rows, (2048,), generator=draw)
            assert torch.equal(table(rows), plain[rows])
        assert torch.equal(table(torch.tensor([ROWS - 1])), plain[[ROWS - 1]])
    assert set(ours.parts.granted()) == set(wanted)
    assert ours.parts.moved_bytes <= 0.01 * ours.parts.asked_bytes
    assert session.stats().nodes[NEAR].current_bytes == 3 * BLOCK
    before = ours.parts.asked_bytes
    table(torch.tensor([1]))
    assert ours.parts.asked_bytes == before, "outside of the block nothing is counted"


def test_weights_that_do_not_fit_are_refused(session: Session) -> None:
    options = {"near": [NEAR], "far": [FAR], "room_bytes": BLOCK, "session": session}
    with pytest.raises(ValueError, match="not in memory of this session"):
        MostUsedRows(torch.nn.Embedding(64, 64), **options)
    small = torch.nn.Embedding(64, 64)
    small.weight.data = from_tensor(small.weight.data, policy=f"bind:{FAR}", session=session)
    with pytest.raises(ValueError, match="need some"):
        MostUsedRows(small, **options)
