"""How a transfer over several tiers is cut into chunks."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cxl_offload import _C

PIECES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(-1, 3), st.booleans()), min_size=0, max_size=12
)


@given(PIECES, st.integers(1, 100), st.dictionaries(st.integers(-1, 3), st.floats(0.1, 10)))
def test_chunks_are_the_pieces_cut_in_order_of_rate(
    pieces: Any, chunk_bytes: int, rates: dict[int, float]
) -> None:
    rows, at = [], 0
    for nbytes, lane, pinned in pieces:
        rows.append((10_000 + at, 50_000 + at, nbytes, lane, pinned))
        at += nbytes
    chunks = _C.plan_chunks(rows, chunk_bytes, rates)
    covered = sorted((device, host_, size) for device, host_, size, _, _ in chunks)
    ends = 10_000
    for device, host_, size in covered:
        assert device == ends
        assert host_ - 50_000 == device - 10_000
        ends += size
    assert ends == 10_000 + at
    lanes = {row[3] for row in rows}
    for lane in lanes:
        own = [chunk[0] for chunk in chunks if chunk[3] == lane]
        assert own == sorted(own)
    if len(lanes) > 1:
        assert all(chunk[2] <= chunk_bytes for chunk in chunks)
    progress = dict.fromkeys(lanes, 0.0)
    left = {lane: sum(chunk[3] == lane for chunk in chunks) for lane in lanes}
    for _, _, size, lane, _ in chunks:
        progress[lane] += size / rates.get(lane, 1)
        left[lane] -= 1
        going = [each for each in lanes if left[each]]
        for one, other in itertools.permutations(going, 2):
            # While both have chunks left, neither is ahead by more than a chunk of either.
            most = chunk_bytes / min(rates.get(one, 1), rates.get(other, 1))
            assert progress[one] - progress[other] <= most * 1.0001
